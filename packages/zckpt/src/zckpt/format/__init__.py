"""Format: manifest, schema, chunks, shards and regions as pure values.  FORMAT.md is the specification."""
