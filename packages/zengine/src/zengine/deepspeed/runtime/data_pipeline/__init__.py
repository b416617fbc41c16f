"""`deepspeed.runtime.data_pipeline`: curricula and token routing, by the names that scripts import."""
