"""Kubernetes: annotations become environment, time and a mount (the webhook, `lastcall kube`), and jobs are paused and resumed."""
