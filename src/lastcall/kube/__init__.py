"""Kubernetes: annotations become variables, grace and a mount (the webhook, `lastcall kube`), and jobs are
paused and resumed."""
