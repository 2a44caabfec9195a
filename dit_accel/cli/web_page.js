() => document.querySelector("#preset").addEventListener("keydown", (event) => {
    // As Enter does: with Tab, gradio drops what was typed and leaves the list open.
    if (event.key !== "Tab") return;
    event.stopPropagation();
    document.getElementById(event.target.getAttribute("aria-activedescendant"))
        ?.dispatchEvent(new MouseEvent("mousedown", {bubbles: true}));
}, true)
