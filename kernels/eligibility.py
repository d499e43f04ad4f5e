"""What the decode strategies demand of a layout."""

from stemserve.kernels.layout import AttentionLayout


def decode_refusal(layout: AttentionLayout) -> str | None:
    """Why a layout is not a decode step of stored segments of one row, or None if it is."""
    if layout.segment_is_item.any():
        return "decode attention has no item segments; run them in the prefill phase"
    if (layout.segment_rows != 1).any():
        rows = int(layout.segment_rows.max())
        return f"decode attention has one row a segment, not {rows}; run them in the prefill phase"
    return None
