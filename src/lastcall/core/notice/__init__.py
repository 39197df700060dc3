"""One process and a notice: the kill wait, the boundary, the rescue; the launcher; periodic saves and what
prepares for them."""
