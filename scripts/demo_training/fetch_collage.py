"""Fetch free emoji, photographed stamps and photographs, and pack them into `collage.ARCHIVE` for `demo-pictures`.

    python -m scripts.demo_training.fetch_collage

Needs Debian 12 with apt-get and npm; fetches 301 MB in 40 s and packs 21 MB. The README lists sources and licences.
"""

import hashlib
import io
import re
import shutil
import subprocess
import tempfile
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from .collage import ARCHIVE, PHOTOGRAPH_SIZE, SPRITE_SIDE

FLUENT = "@lobehub/fluent-emoji-3d@1.1.0"
SHA256 = {
    FLUENT: "c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58",
    "fonts-noto-color-emoji=2.042-0+deb12u1": "a5ab0f69c7938423862320d9aca5dd187b3fd879d6a9a57dd52e17c3fa8d2751",
    "tuxpaint-stamps-default=2022.06.04-1": "6db6c1bfc870a47f1499d6203b083522eacb57c5f9c87d468f2e92eb6d9d5f34",
    "tuxpaint-data=1:0.9.28-sdl2-1": "f5d0de8f9a70d2efc1241d19f26168cb8bf279f1b77abd3631e7a1a55c40e5e5",
    "mate-backgrounds=1.26.0-1": "7bf4c2209f34b4f61ba6d24c8b58c28b361e82e4b943aae6d42c030169af9e04",
    "lomiri-wallpapers-16.04=20.04.0-2": "a99ff6a3bfe451e4cc0682ecb3cc82e71740626d59e4845ae34a0a0e45421eab",
    "gcompris-qt-data=3.1-2": "e9cf06ab2105529068df73085784e835d2ff03f870d2a8091f09125d40abac9f",
}

EMOJI = ((0x1F32D, 0x1F393), (0x1F3A0, 0x1F3F0), (0x1F400, 0x1F43E), (0x1F451, 0x1F462), (0x1F484, 0x1F52F))
EMOJI += ((0x1F680, 0x1F6A4), (0x1F6D0, 0x1F6FC), (0x1F950, 0x1F9AE), (0x1F9B4, 0x1F9FF), (0x1FA70, 0x1FABF))
NOT_THINGS = "symbol sign person man woman baby mark arrow button up down no sticker"
STAMPS = ("animals", "food", "plants", "vehicles", "household", "hobbies", "sports", "space")
SMALLEST_STAMP = 100  # pixels

# Subjects of photographs, by file name, and for GCompris's resource files in the order of the large images in them.
PHOTOGRAPHS = """burnt_bark:bark cliff corn_maze:corn jellyfish lighthouse mossy_log:moss mudstone ocean_splash:splash
ocean_waves:waves redwoods_above:trees rocks:pebbles sheep:meadow sun_behind_clouds:clouds sun_behind_leaves:leaves
trees_above:trees trees_at_dusk:branches wool_mill_machine:machinery Aqua:water Blinds:leaf Dune:reeds
FreshFlower:petals Garden:flower GreenMeadow:grass LadyBird:flower RainDrops:leaf Storm:storm Wood:planks
YellowFlower:petals Bridge_by_Sander_Klootwijk:beach Dragonfly_by_Bolly:branches Picture_1A_by_freespace:brushes
aitzgorri_by_Aitzol_Berasategi:mountains friends_by_Aitzol_Berasategi:dogs life_by_Aitzol_Berasategi:stream
picosdeeuropa_by_Aitzol_Berasategi:mountains seeding_by_Clements_Engelhardt:dandelions
sunset_by_Aitzol_Berasategi:sunset greentock_by_Peter_Nerlich:clock"""
IN_RESOURCES = {
    "erase": """rhinoceros calf caterpillar spoonbills panda camels hawk squirrel kingfisher swans gorilla alpaca deer
    gibbon chameleon squirrel crab meerkats butterfly heron cheetah bee horse gosling penguin monkey bat toucan seal
    goat monkey giraffe kitten""",
    "explore_farm_animals": "duck cow sheep horses cat hens pig dog owl",
    "explore_world_animals": """kangaroo moose chameleon crocodile hedgehog macaw koala lemurs lizard bear bison whale
    jaguar panda giraffes""",
    "explore_monuments": """village arena palace castle castle tower cathedral castle island bridge pyramid pyramid
    pyramid pyramid mosque tower gate palace jungle temple temple temple dome palace palace ruins cliff river statue
    house canyon temple statue fort city temple pyramid dome city arena mountains wall castle cathedral hall ruins gate
    palace church""",
}


def main() -> None:
    """Fetch, check and pack."""
    counts: Counter[str] = Counter()
    ARCHIVE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(ARCHIVE, "w") as archive:
        folder = Path(name)
        fetch(folder)
        for sprite_name, sprite in (*noto(folder), *fluent(folder), *stamps(folder)):
            add(archive, f"sprites/{sprite_name}", square(sprite), counts, "WEBP", quality=88)
        for subject, photograph in (*files(folder), *resources(folder)):
            fitted = ImageOps.fit(photograph.convert("RGB"), PHOTOGRAPH_SIZE, Image.Resampling.LANCZOS)
            add(archive, f"photographs/{subject}", fitted, counts, "JPEG", quality=86)
    for kind in ("sprites", "photographs"):
        kept = [number for stem, number in counts.items() if stem.startswith(kind)]
        print(f"{kind}: {sum(kept)} with {len(kept)} names")
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size / 1e6:.1f} MB")


def fetch(folder: Path) -> None:
    """Fetch the packages, compare their SHA-256, and unpack them."""
    _, *debian = SHA256
    subprocess.run(["npm", "pack", FLUENT], cwd=folder, check=True, capture_output=True)
    subprocess.run(["apt-get", "download", *debian], cwd=folder, check=True, capture_output=True)
    for package in (*folder.glob("*.tgz"), *folder.glob("*.deb")):
        if hashlib.sha256(package.read_bytes()).hexdigest() not in SHA256.values():
            raise ValueError(f"{package.name} must have one of the SHA-256 of {Path(__file__).name}")
        if package.suffix == ".deb":
            subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
        else:
            shutil.unpack_archive(package, folder, filter="data")


def add(archive: zipfile.ZipFile, stem: str, image: Image.Image, counts: Counter[str], kind: str, quality: int) -> None:
    """Write an image as the next one of `stem`."""
    encoded = io.BytesIO()
    image.save(encoded, kind, quality=quality)
    archive.writestr(f"{stem}/{counts[stem]}.{kind.lower()}", encoded.getvalue())
    counts[stem] += 1


def square(sprite: Image.Image) -> Image.Image:
    """Cut off the transparent margin, and fit the rest into a square of SPRITE_SIDE pixels."""
    sprite = sprite.convert("RGBA")
    sprite = sprite.crop(sprite.getchannel("A").getbbox())
    return ImageOps.pad(sprite, (SPRITE_SIDE, SPRITE_SIDE), Image.Resampling.LANCZOS, color=(0, 0, 0, 0))


def emoji() -> Iterator[tuple[int, str]]:
    """Yield the code points of emoji of things, and their names of one or two words."""
    for first, last in EMOJI:
        for code in range(first, last + 1):
            words = unicodedata.name(chr(code), "").lower().removesuffix(" face").split()
            if (
                1 <= len(words) <= 2
                and all(word.isalpha() for word in words)
                and not set(NOT_THINGS.split()) & set(words)
            ):
                yield code, " ".join(words)


def noto(folder: Path) -> Iterator[tuple[str, Image.Image]]:
    """Yield names and images of Noto's emoji, whose bitmaps have one size."""
    font = ImageFont.truetype(folder / "usr/share/fonts/truetype/noto/NotoColorEmoji.ttf", 109)
    for code, name in emoji():
        sprite = Image.new("RGBA", (160, 160))
        ImageDraw.Draw(sprite).text((10, 10), chr(code), font=font, embedded_color=True)
        if sprite.getbbox():
            yield name, sprite


def fluent(folder: Path) -> Iterator[tuple[str, Image.Image]]:
    """Yield names and images of Fluent's emoji."""
    for code, name in emoji():
        file = folder / f"package/assets/{code:x}.webp"
        if file.exists():
            yield name, Image.open(file)


def stamps(folder: Path) -> Iterator[tuple[str, Image.Image]]:
    """Yield names and images of Tux Paint's stamps that are large and described as "A NAME."."""
    for file in sorted((folder / "usr/share/tuxpaint/stamps").rglob("*.png")):
        text = file.with_suffix(".txt")
        found = text.exists() and re.match(r"An? ((\w+ ){0,2}\w+)\.$", text.read_text().splitlines()[0])
        if found and set(STAMPS) & set(file.parts) and "cartoon" not in file.parts:
            stamp = Image.open(file)
            if max(stamp.size) >= SMALLEST_STAMP:
                yield found[1].lower(), stamp


def files(folder: Path) -> Iterator[tuple[str, Image.Image]]:
    """Yield subjects and photographs that are files of their own."""
    subjects = dict((entry.split(":") * 2)[:2] for entry in PHOTOGRAPHS.split())
    for file in sorted(folder.rglob("*.jpg")):
        if file.stem in subjects and {"templates", "backgrounds"} & set(file.parts):
            yield subjects[file.stem], Image.open(file)


def resources(folder: Path) -> Iterator[tuple[str, Image.Image]]:
    """Yield subjects and photographs of GCompris, which its resource files hold uncompressed."""
    for name, subjects in IN_RESOURCES.items():
        data = (folder / f"usr/share/gcompris-qt/rcc/{name}.rcc").read_bytes()
        starts = [found.start() for found in re.finditer(rb"RIFF....WEBP|\xff\xd8\xff[\xe0\xe1]", data, re.DOTALL)]
        images = [Image.open(io.BytesIO(data[start:])) for start in starts]
        yield from zip(subjects.split(), [image for image in images if min(image.size) >= 300], strict=True)


if __name__ == "__main__":
    main()
