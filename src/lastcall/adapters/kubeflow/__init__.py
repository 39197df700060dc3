"""Kubeflow Trainer: a Trainer's function becomes a TrainJob that is protected in its pods, without a change
to the function.

trainer      what the user writes: TransformersTrainer
locations    output_dir: a claim, or a path
standalone   whether a function can run on its own
function_textthe function as text that neither a shell nor Kubernetes alters
submission   the trainer in the SDK's terms: a CustomTrainer, and an option for what that cannot express
patch        TrainerClient.train() understands a TransformersTrainer
pod          what runs in the pod; does not import the SDK
"""
