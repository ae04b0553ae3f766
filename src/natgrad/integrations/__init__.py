"""K-FAC inside training frameworks, one module a framework; each imports its own and nothing here imports them.

``lightning``     `KFACCallback` for the Lightning Trainer
``transformers``  `KFACCallback` for the Hugging Face Trainer

Accelerate needs no module: ``kfac.attach(optimizer.optimizer, grad_scaler=accelerator.scaler)``.
"""
