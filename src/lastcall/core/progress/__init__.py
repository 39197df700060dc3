"""How far the run is: one document, served over HTTP or pushed to Kubeflow Trainer."""
