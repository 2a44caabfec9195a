"""Colours of the scenes, RGB in 0..1.

Stickers are vivid and landscapes pale: nowhere in a landscape do both the chroma `max(rgb) - min(rgb)` reach 0.35 and
the saturation `chroma / max(rgb)` 0.57, but they do nearly everywhere on a sticker. So pixels alone identify stickers.
"""

STICKER = {
    "red": (0.91, 0.17, 0.20),
    "orange": (0.99, 0.52, 0.07),
    "yellow": (1.00, 0.84, 0.12),
    "green": (0.12, 0.72, 0.32),
    "blue": (0.13, 0.42, 0.93),
    "purple": (0.53, 0.20, 0.82),
    "pink": (0.98, 0.32, 0.64),
}

STICKER_RIM = (0.99, 0.975, 0.94)

SKY_TOP = {"noon": (0.50, 0.72, 0.90), "sunset": (0.50, 0.42, 0.62), "night": (0.08, 0.10, 0.25)}
SKY_LOW = {"noon": (0.90, 0.95, 0.97), "sunset": (0.99, 0.78, 0.64), "night": (0.25, 0.29, 0.48)}
LIGHT_DISC = {"noon": (1.00, 0.98, 0.90), "sunset": (1.00, 0.93, 0.82), "night": (0.96, 0.95, 0.88)}
LIGHT_GLOW = {"noon": 0.25, "sunset": 0.55, "night": 0.35}

# Tints multiply the ground to give it the light of its time of day.
GROUND_TINT = {"noon": (1.00, 1.00, 1.00), "sunset": (0.96, 0.80, 0.80), "night": (0.40, 0.46, 0.64)}

GROUND_FAR = {
    "hills": (0.70, 0.83, 0.70),
    "desert": (0.97, 0.87, 0.70),
    "sea": (0.66, 0.84, 0.90),
    "mountains": (0.72, 0.77, 0.87),
}
GROUND_NEAR = {
    "hills": (0.33, 0.58, 0.36),
    "desert": (0.88, 0.71, 0.52),
    "sea": (0.29, 0.52, 0.63),
    "mountains": (0.92, 0.94, 0.97),
}
