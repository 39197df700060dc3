"""Kubeflow Trainer: a Trainer's function becomes a TrainJob that is protected in its pods, and knows nothing of it.

trainer      what the user writes: TransformersTrainer
locations    output_dir: a claim, or a path
standalone   whether a function can stand alone
function_textthe function as text that no shell and no Kubernetes changes on its way
submission   the trainer in the SDK's words: a CustomTrainer, and an option for what that cannot say
patch        TrainerClient.train() understands a TransformersTrainer
pod          what runs in the pod; imports nothing of the SDK
"""
