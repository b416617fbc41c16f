"""Loading of models for inference, quantized while their files are read.

    loaded = zengine.inference.load_model("llama-3-8b", format="int4")    # a folder, a GGUF file, a checkpoint, ...
    loaded.module, loaded.decoder, loaded.report

Modules, low first: stored (tensors in files, plain or quantized), parts (of tensors, in the files of several ranks),
checkpoint_lists (DeepSpeed's JSON), prequantized (GPTQ, AWQ, compressed-tensors), gguf, sources (what lies at a
path), weights (memory for a model on the meta device, and plain values out of files), streaming (a module filled and
quantized layer by layer), packed (quantized models written once, read without quantizing), load (the verb).
"""
