"""`mlx_lm_mtp compare`: are the tokens stock's, and if not, is it rounding or a bug?

Each prompt is decoded by stock and with drafts (:mod:`.decode`). At the first token
that differs, two questions are asked (:mod:`.verdict`): is our token what stock's own
sampler makes of our log-probabilities, and do these differ from stock's by no more than
rounding can make them (:mod:`.rounding`)?
"""
