"""What a run will need, before it runs: memory by owner, activations, bytes sent, what is worth knowing.

models.py       the model: a factory that is named, or a transformer of some size; without memory
sizes.py        what the partition of a plan needs for it, and sends
activations.py  what its forward and backward need: a dry run on tensors without storage
peaks.py        both together, by phase; the largest micro-batch that fits
measured.py     the same from real steps in this process
batches.py      what the model is given
advice.py       what a reader of the config may not know
explanation.py, forecast.py   what `zengine explain` and `zengine plan` say
"""
