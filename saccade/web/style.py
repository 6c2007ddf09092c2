"""Theme and CSS of the page; only system fonts, nothing is fetched from other hosts."""

from typing import Any

CSS = """
.gradio-container { max-width: 1280px !important; margin: 0 auto !important; }
#head { padding: 10px 2px 0; }
#head h1 { font-size: 28px; letter-spacing: -.015em; margin: 0; line-height: 1.15; font-weight: 650; }
#head p { margin: 6px 0 0; opacity: .75; max-width: 74ch; }
.predictions { list-style: none; margin: 2px 0 8px; padding: 0; display: grid; gap: 3px; }
.predictions li { position: relative; display: flex; justify-content: space-between; gap: 12px; padding: 5px 10px;
  margin: 0; border-radius: 6px; overflow: hidden; background: var(--background-fill-secondary); font-size: 14.5px;
  line-height: 1.4; font-variant-numeric: tabular-nums; }
.predictions .bar { position: absolute; inset: 0 auto 0 0; width: var(--width); background: var(--primary-500);
  opacity: .28; border-radius: 6px; }
.predictions li:first-child .class { font-weight: 650; }
.predictions .class, .predictions .value { position: relative; }
.areas .bar { opacity: .35; }
.chip { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 7px; vertical-align: -1px;
  box-shadow: 0 0 0 1px rgba(128, 128, 128, .5); }
.soft { opacity: .7; font-size: 13px; margin: 0; }
.token { font-size: 14px; line-height: 1.5; min-height: 3em; }
.notice { padding: 10px 14px; border-radius: 6px; border-left: 4px solid #d55e00; font-size: 14.5px; line-height: 1.45;
  background: color-mix(in srgb, #d55e00 12%, transparent); }
.notice.warn { border-color: #e69f00; background: color-mix(in srgb, #e69f00 13%, transparent); margin-bottom: 8px; }
.notice.hint { border-color: var(--primary-500); background: color-mix(in srgb, var(--primary-500) 10%, transparent); }
.drawing img { width: 100% !important; height: auto !important; object-fit: contain; }
.mosaic img { cursor: crosshair; }
.summary { padding-top: 4px; }
.photos { border: none !important; background: none !important; height: auto !important; min-height: 0 !important; }
.photos .grid-wrap { max-height: none !important; height: auto !important; min-height: 0 !important;
  padding: 0 !important; overflow: visible !important; }
.photos .grid-container { grid-template-columns: repeat(4, minmax(0, 1fr)) !important; gap: 6px !important;
  margin: 0 !important; height: auto !important; grid-template-rows: none !important; grid-auto-rows: auto !important; }
.photos .gallery-item { min-width: 0 !important; height: auto !important; }
.photos .thumbnail-item { aspect-ratio: 1 !important; border-radius: 6px !important; min-width: 0 !important;
  width: 100% !important; height: auto !important; }
.photos .caption-label { display: none !important; }
#model-a input, #model-b input, #segment-model input { font-size: 13.5px; text-overflow: ellipsis; }
.dark button[role=tab].selected { color: #79b8e0; }
footer { opacity: .6; }
@media (max-width: 640px) { .gradio-container { padding: 10px !important; } #head h1 { font-size: 23px; } }
"""

SYSTEM = ["system-ui", "-apple-system", "Segoe UI", "sans-serif"]
MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "monospace"]


def theme() -> Any:
    """Return Gradio's base theme in blue (the colour of the first token), with system fonts."""
    import gradio as gr

    blue = gr.themes.Color(
        "#eaf4fb", "#d2e7f5", "#a8d1ec", "#79b8e0", "#4a9ed3", "#0072b2", "#00659e", "#005685", "#00466d", "#003757",
        "#002740", name="saccade",
    )  # fmt: skip
    return gr.themes.Base(
        primary_hue=blue, secondary_hue=blue, neutral_hue="slate", font=SYSTEM, font_mono=MONO, radius_size="md"
    ).set(block_label_text_size="12px", block_shadow="none")
