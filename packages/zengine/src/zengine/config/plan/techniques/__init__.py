"""Rules and plans of techniques that change what is trained."""
