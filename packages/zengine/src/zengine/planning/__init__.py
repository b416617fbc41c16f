"""Planning: memory by owner, activations, traffic and advice for a run, before it starts.

models.py       the model: a user's factory, or a transformer of a given size; on the meta device
sizes.py        memory and traffic of the partition under a plan
activations.py  memory of forward and backward: a dry run on tensors without storage
peaks.py        both together, by phase; the largest micro-batch that fits
measured.py     the same from real steps in this process
batches.py      input of the model
advice.py       consequences of the config, with numbers
explanation.py, forecast.py   output of `zengine explain` and `zengine plan`
"""
