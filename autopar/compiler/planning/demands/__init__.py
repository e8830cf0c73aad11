"""Turn what the user asks for into constraints: layouts, kinds and degrees of parallelism, scopes, and stages."""
