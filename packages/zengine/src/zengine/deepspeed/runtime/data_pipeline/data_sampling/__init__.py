"""`deepspeed.runtime.data_pipeline.data_sampling`."""
