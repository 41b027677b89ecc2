"""The edges: translate, authorise, call the engine, translate back."""
