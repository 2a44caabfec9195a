"""ComfyUI nodes: copy this folder into ComfyUI's custom_nodes, see docs/guide/comfyui.md."""

from dit_accel.tools.comfyui import NODE_CLASS_MAPPINGS as NODE_CLASS_MAPPINGS
from dit_accel.tools.comfyui import NODE_DISPLAY_NAME_MAPPINGS as NODE_DISPLAY_NAME_MAPPINGS
