"""Files and folders of transformers and safetensors."""
