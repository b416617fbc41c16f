"""`deepspeed.runtime.data_pipeline`: curricula and token routing, by DeepSpeed's names."""
