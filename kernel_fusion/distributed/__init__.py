"""Tensors that are spread over ranks: sharding rules of every operator, parallel styles, norms of spread rows."""
