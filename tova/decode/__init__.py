"""One decoded token: a layer's slots keep their place, and no stored key moves.

``plain`` is torch and takes any policy on any device, ``cpu`` (numba) and ``gpu`` (Triton) are compiled from a policy's
rule. :func:`tova.decode.one_token.decode` picks one.
"""
