"""Planning: memory by owner, activations, traffic and advice for a run, before it starts.

models.py       model and batches: from a user's factory, or of a given size, on the meta device
activations.py  memory of forward and backward: a dry run on tensors without memory
hollow.py       these tensors, for usual models
sizes.py        memory and traffic of the partition, the peak by phase, the largest micro-batch that fits
rounds.py       what rounds of local steps add to them
measured.py     the same from real steps in this process
advice.py       consequences of the config, with numbers
explanation.py, forecast.py   output of `zengine explain` and `zengine plan`
tables.py       text formatting
"""
