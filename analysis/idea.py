# %% [markdown]
# # The idea, in less than 80 lines: one integer per token
#
# A transformer that writes a text keeps a key and a value of every token. A cache with a *budget* of k keeps only k of
# them, and a *policy* says which: TOVA drops the token that was just looked at least. This notebook is one attention
# head under TOVA in plain torch; `tova` does the same for every head, layer, policy and model.

# %%
import torch

NEVER = torch.iinfo(torch.int64).max  # the step at which a token goes that is never dropped

# %% [markdown]
# ## 1. Token by token
#
# This is what a cache that forgets does. A query sees the tokens that are held and itself. If more than the budget are
# held then, the one with the lowest weight goes, key and value. The newest token is no candidate: no later token has
# looked at it yet.


# %%
def decode(query, key, value, budget):
    """Output [T, D] and ``evicted_at`` [T] of a cache that drops as it goes, from [T, D] each."""
    held, outputs, evicted_at = [], [], torch.full((len(query),), NEVER)
    for t in range(len(query)):
        held.append(t)
        weights = (query[t] @ key[held].T / key.shape[1] ** 0.5).softmax(-1)
        outputs.append(weights @ value[held])
        if len(held) > budget:
            victim = held.pop(int(weights[:-1].argmin()))
            evicted_at[victim] = t
    return torch.stack(outputs), evicted_at


# %% [markdown]
# ## 2. All tokens at once
#
# All that the loop decides is one integer per token: `evicted_at`, the last step that saw it. To decide it the loop
# needs the logits and not a single value. So one matrix product makes all logits, and a small scan goes through them
# step by step: softmax over the kept set, drop the lowest among those that were observed.


# %%
def scan(logits, budget):
    """``evicted_at`` [N] from logits [C, N] of C queries, whose own tokens are the last C of the N candidates."""
    queries, candidates = logits.shape
    evicted_at = torch.full((candidates,), NEVER)
    held = torch.arange(candidates) < candidates - queries
    for t in range(queries):
        newest = candidates - queries + t
        observed = held.clone()
        held[newest] = True
        weights = logits[t].masked_fill(~held, -torch.inf).softmax(-1)
        if held.sum() > budget:
            victim = weights.masked_fill(~observed, torch.inf).argmin()
            held[victim], evicted_at[victim] = False, t
    return evicted_at


# %% [markdown]
# Given `evicted_at`, the rest is ordinary masked attention: query t sees token j when `j <= t <= evicted_at[j]`. One
# mask and one more matrix product give every output of the loop. We call this a *replay*.


# %%
def visible(evicted_at, queries):
    """bool [C, N]: what each query sees, itself and what has come before it and has not gone."""
    t = torch.arange(queries)[:, None]
    j = torch.arange(len(evicted_at)) - (len(evicted_at) - queries)  # below 0: held from before the first query
    return (j <= t) & (t <= evicted_at)


def replay(query, key, value, budget):
    """Output [C, D] and ``evicted_at`` [N] from queries [C, D] and the candidates' keys and values [N, D]."""
    logits = query @ key.T / key.shape[1] ** 0.5
    evicted_at = scan(logits, budget)
    weights = logits.masked_fill(~visible(evicted_at, len(query)), -torch.inf).softmax(-1)
    return weights @ value, evicted_at


# %% [markdown]
# ## 3. Chunk by chunk
#
# What is gone never comes back, so a long text never needs all its logits. A chunk of queries attends to what is held
# and to itself, and only the survivors are carried on: T tokens cost T x (budget + chunk) logits instead of T x T.


# %%
def replay_in_chunks(query, key, value, budget, chunk):
    """As ``replay`` of a whole text."""
    held, outputs, evicted_at = torch.arange(0), [], torch.full((len(query),), NEVER)
    for new in torch.arange(len(query)).split(chunk):
        candidates = torch.cat([held, new])
        output, last_step = replay(query[new], key[candidates], value[candidates], budget)
        outputs.append(output)
        gone = last_step < NEVER
        evicted_at[candidates[gone]] = new[0] + last_step[gone]
        held = candidates[~gone]
    return torch.cat(outputs), evicted_at


# %% [markdown]
# ## Is it the same?
#
# Here is a model of one layer and one head with random weights, reading random tokens with the library's cache. Its
# queries, keys and values go through the three functions above. Each must drop what the cache dropped, when the cache
# dropped it, and give the output that the layer gave.

# %%
from types import SimpleNamespace

from transformers import LlamaConfig, LlamaForCausalLM

import tova


def one_head(seed, budget, tokens):
    """Query, key, value and output [T, D] of the layer of a tiny model under ``tova``, and its ``evicted_at`` [T]."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, initializer_range=0.3, **sizes)).eval()
    tova.enable(model)
    caught, layer = {}, model.model.layers[0].self_attn
    layer.v_proj.register_forward_hook(lambda _, inputs, output: caught.update(value=output[0]))
    layer.o_proj.register_forward_pre_hook(lambda _, inputs: caught.update(output=inputs[0][0]))
    observer = SimpleNamespace(see=lambda call: caught.update(query=call.query[0, 0], key=call.key[0, 0]))
    cache = tova.EvictingCache(tova.policies.make("tova", budget=budget), observers=[observer])
    with torch.inference_mode():
        model(torch.randint(100, (1, tokens)), cache=cache)
    return [caught[name] for name in ("query", "key", "value", "output")], cache.evicted_at[0, 0]


# %%
for budget in (1, 16, 64):
    (query, key, value, output), evicted_at = one_head(seed=0, budget=budget, tokens=200)
    for ours in (decode, replay, lambda *x: replay_in_chunks(*x, chunk=48)):
        found, when = ours(query, key, value, budget)
        assert torch.equal(when, evicted_at)
        assert torch.allclose(found, output, atol=1e-5)
    print(
        f"budget {budget:2d}: {int((evicted_at < NEVER).sum())} of 200 tokens dropped, each when the cache dropped it"
    )

# %% [markdown]
# ## What it looks like
#
# The logits of this picture are made up, to look like those of a trained head: the first four tokens are looked at by
# all, most attention is on what has just been said, and a few tokens are wanted for a while. The scan knows nothing of
# that, and yet: the sinks stay, a window moves along, and a token that is wanted stays until it is not. A column ends
# at `evicted_at`, a row is what one query sees.

# %%
import matplotlib.pyplot as plt
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, LogNorm

TOKENS, BUDGET = 160, 32
WANTED = {9: 118, 23: 74, 40: 132, 64: 160, 71: 100, 90: 140}  # a token, and the query from which on it is not

torch.manual_seed(0)
distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
logits = torch.randn(TOKENS, TOKENS) - distance.clamp(0, 60) / 8
logits[:, :4] = 1.5 + 0.5 * torch.randn(TOKENS, 4)
for token, until in WANTED.items():
    logits[token:until, token] = 1 + 0.7 * torch.randn(until - token)
logits = logits.masked_fill(distance < 0, -torch.inf)

seen = visible(scan(logits, BUDGET), TOKENS)
weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)

plt.rcParams["font.size"] = 9
figure, axes = plt.subplots(figsize=(7.2, 5.6), dpi=120, layout="constrained")
axes.imshow(torch.where(distance >= 0, 0.0, torch.nan), cmap=ListedColormap(["#ebe7e0"]))
blues = LinearSegmentedColormap.from_list("blues", plt.colormaps["Blues"](torch.linspace(0.3, 1, 256)))
shown = axes.imshow(weights.where(seen, torch.nan), cmap=blues, norm=LogNorm(1e-3, 0.3))
bar = figure.colorbar(shown, shrink=0.6, pad=0.01, extend="both", ticks=[0.001, 0.01, 0.1])
bar.ax.set_yticklabels(["0.1%", "1%", "10%"])
bar.set_label("attention weight of a token that is held")
axes.set(xlabel="token j (position)", ylabel="query t (position): time goes down")
axes.set_title(f"TOVA holds {BUDGET} of {TOKENS} tokens: what is looked at stays", loc="left", fontweight="bold")
axes.spines[["top", "right"]].set_visible(False)
line = {"arrowstyle": "-", "color": "black", "linewidth": 0.8}
axes.annotate("sinks: looked at by all", (4, 153), (9, 153), va="center", arrowprops=line)
axes.annotate("wanted to the end", (65, 153), (70, 153), va="center", arrowprops=line)
axes.annotate("the newest token is\nnever dropped at once", (61, 59), (75, 42), va="center", arrowprops=line)
axes.text(40, 135, "wanted until\nquery 132", ha="center", va="top")
axes.text(25, 100, "dropped,\nnever seen\nagain", ha="center", va="center")
axes.annotate("a window of recent\ntokens moves along", (97, 101), (111, 84), va="center", arrowprops=line)
plt.show()
