"""Host pools as SGLang has them: a buffer in one of its layouts, and where the pieces of each page lie in it."""

from __future__ import annotations

import torch

PAGE_TOKENS = 4
PAGES = 12
LAYERS, HEADS, HEAD_SIZE = 3, 2, 8
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head", "page_first_kv_split")


class HostPool:
    """K and V of every token, in `layout`; `mla`: one latent of every token in place of both.

    `page(n)` is what page n holds, `[2 or 1, tokens, layers, heads, head_size]`, whatever the layout. `zero_copy` says
    whether it tells where its pieces lie.
    """

    def __init__(
        self, layout: str = "page_first", mla: bool = False, pages: int = PAGES, zero_copy: bool = True
    ) -> None:
        self.layout, self.page_size, self.size = layout, PAGE_TOKENS, pages * PAGE_TOKENS
        self.layer_num, self.head_num, self.head_dim = LAYERS, HEADS, HEAD_SIZE
        self.dtype = torch.float32
        self.sides = 1 if mla else 2
        shape = {
            "layer_first": (LAYERS, self.size, HEADS, HEAD_SIZE),
            "page_first": (self.size, LAYERS, HEADS, HEAD_SIZE),
            "page_first_direct": (pages, LAYERS, PAGE_TOKENS, HEADS, HEAD_SIZE),
            "page_head": (pages, HEADS, PAGE_TOKENS, LAYERS, HEAD_SIZE),
            "page_first_kv_split": (pages, LAYERS, PAGE_TOKENS, HEADS, HEAD_SIZE),
        }[layout]
        noise = torch.Generator().manual_seed(1)
        if layout == "page_first_kv_split":  # K and V are two buffers
            self.buffers = [torch.randn(shape, generator=noise) for _ in range(self.sides)]
        else:
            whole = torch.randn((self.sides, *shape), generator=noise)
            self.buffers = list(whole)
        self.zero_copy = zero_copy

    def page(self, number: int) -> torch.Tensor:
        """A view of a page."""
        tokens = slice(number * PAGE_TOKENS, (number + 1) * PAGE_TOKENS)
        views = []
        for buffer in self.buffers:
            if self.layout == "layer_first":
                views.append(buffer[:, tokens].permute(1, 0, 2, 3))
            elif self.layout == "page_first":
                views.append(buffer[tokens])
            elif self.layout == "page_head":
                views.append(buffer[number].permute(1, 2, 0, 3))
            else:
                views.append(buffer[number].permute(1, 0, 2, 3))
        return torch.stack([view.clone() for view in views])

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Address and size of each piece, page by page; in `layer_first` K and V in turn, layer by layer."""
        if not self.zero_copy:
            raise NotImplementedError("this pool gives flat pages alone")
        addresses, sizes = list[int](), list[int]()
        for first in indices[::PAGE_TOKENS].tolist():
            if self.layout == "layer_first":
                pieces = [
                    buffer[layer, first : first + PAGE_TOKENS]
                    for layer in range(LAYERS)
                    for buffer in self.buffers
                ]
            elif self.layout == "page_first":
                pieces = [buffer[first : first + PAGE_TOKENS] for buffer in self.buffers]
            else:
                pieces = [buffer[first // PAGE_TOKENS] for buffer in self.buffers]
            addresses += [piece.data_ptr() for piece in pieces]
            sizes += [piece.numel() * piece.element_size() for piece in pieces]
        return addresses, sizes

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.page(0).shape, dtype=self.dtype).flatten()

    def get_data_page(self, index: int) -> torch.Tensor:
        return self.page(index // PAGE_TOKENS).flatten()

    def set_from_flat_data_page(self, index: int, flat: torch.Tensor) -> None:
        """Write a page whose first token has this index."""
        number = index // PAGE_TOKENS
        page = flat.view(self.page(0).shape)
        tokens = slice(number * PAGE_TOKENS, (number + 1) * PAGE_TOKENS)
        for buffer, side in zip(self.buffers, page, strict=True):
            if self.layout == "layer_first":
                buffer[:, tokens] = side.permute(1, 0, 2, 3)
            elif self.layout == "page_first":
                buffer[tokens] = side
            elif self.layout == "page_head":
                buffer[number] = side.permute(2, 0, 1, 3)
            else:
                buffer[number] = side.permute(1, 0, 2, 3)


def indices_of(numbers: list[int]) -> torch.Tensor:
    """The indices of all tokens of these pages."""
    first = torch.tensor(numbers, dtype=torch.int64) * PAGE_TOKENS
    return (first[:, None] + torch.arange(PAGE_TOKENS)).flatten()
