"""TODO jaxprs."""
