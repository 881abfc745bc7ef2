"""How ranks notice that another one is lost or late."""
