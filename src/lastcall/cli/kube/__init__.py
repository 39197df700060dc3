"""The commands of `lastcall kube`."""
