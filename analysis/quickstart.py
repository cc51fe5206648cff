# %% [markdown]
# # Quickstart: what a small model loses when its cache may hold k positions
#
# The cells of `python -m experiments.run experiment=quickstart`: six eviction policies at three budgets and the full
# cache, one model, two books. This notebook reads the frame of the latest such sweep on this machine, or the published
# one where there is none, and makes the same tables and figure as the runner.

# %%
from IPython.display import Image, Markdown

from experiments.report import figure, markdown, png
from experiments.store import latest_or_published

cells, source = latest_or_published("quickstart")
print(f"{len(cells)} cells")

# %% [markdown]
# Perplexity is over all tokens but the first. The loss over the full cache, retained mass and heavy-hitter recall are
# over the saturated steps t >= k: before step k nothing has been dropped, and counting those steps would flatter every
# policy; averages over all steps stand beside them in the last table. Bold is the best of a budget; the full cache does
# not compete.

# %%
Markdown(markdown(cells))

# %%
Image(png(figure(cells)))
