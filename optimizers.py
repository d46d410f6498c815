"""Optimizers beside AdamW, which train.py spells out."""


def muon(state, g, rate, c, table):
    raise NotImplementedError
