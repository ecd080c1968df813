# %% [markdown]
# # A first decode
#
# A sliding layer of a Dots hybrid model keeps one *latent* row for each token, in pages of 64 tokens, and a query sees
# the last 513 tokens, its own included. Three cells lead from the import to a decoded step; the rest looks at what
# happened. Everything here runs on a CPU.

# %%
import jax
import jax.numpy as jnp

from dots_jax import DotsConfig, PagePool, PageTable, swa_latent_decode, write_latent
from dots_jax.pages import extend, release_outside_window, rollback

geometry = DotsConfig.dots3_note_prev().swa
geometry

# %% [markdown]
# Two requests of 574 and 70 tokens take pages from a pool of 24. Their latents, which a model would compute from its
# hidden states, are random here.

# %%
pool, table = PagePool.create(24), PageTable.empty(2, 12)
pool, table, granted, _ = extend(pool, table, jnp.array([574, 70]))

latents = 0.3 * jax.random.normal(jax.random.key(0), (2, 574, geometry.latent_dim), jnp.bfloat16)
kv_pages = jnp.zeros((24, 64, geometry.latent_dim), jnp.bfloat16)
kv_pages = write_latent(kv_pages, table, latents, counts=table.lengths)
table

# %% [markdown]
# One query for each request and each of 64 heads, at the position of the request's last token:

# %%
q = jax.random.normal(jax.random.key(1), (2, 1, geometry.num_heads, geometry.latent_dim), jnp.bfloat16)
out, lse = swa_latent_decode(
    q,
    kv_pages,
    table,
    window=geometry.window,
    scale=geometry.softmax_scale,
    v_dim=geometry.kv_lora_rank,
    return_lse=True,
)
out.shape, lse.shape

# %% [markdown]
# ## What each shape means
#
# | array | shape | axes |
# |---|---|---|
# | `table.pages` | `[B, P]` | the physical page of each request's logical pages; -1 where there is none |
# | `table.lengths` | `[B]` | tokens of each request, those of this step included |
# | `kv_pages` | `[N, 64, D]` | physical page, token in the page, latent column; one such array for each layer |
# | `q` | `[B, S, H, D]` | request, query token of this step, head, column; *absorbed*: as wide as a latent row |
# | `out` | `[B, S, H, R]` | the values are the first `R` columns of the same latent rows |
# | `lse` | `[B, S, H]` | natural log of the sum of exponentials, to merge with attention over other keys |

# %%
for name, array in {"pages": table.pages, "kv_pages": kv_pages, "q": q, "out": out, "lse": lse}.items():
    print(f"{name:<9} {array.dtype!s:<9} {array.shape}")

# %% [markdown]
# The definition of all this is a page of readable float32 code, which every fast implementation is compared with:

# %%
from dots_jax.decode import swa_latent_decode_reference

expected, _ = swa_latent_decode_reference(
    q, kv_pages, table, window=geometry.window, scale=geometry.softmax_scale, v_dim=geometry.kv_lora_rank
)
bool(jnp.abs(out.astype(jnp.float32) - expected).max() < 2e-3)

# %% [markdown]
# ## A step with drafts, and a release
#
# Speculative decoding adds four draft tokens, decodes all of them at once, keeps those that the model agrees with and
# drops the rest. The drawing has a row for each request and a box for each logical page, with the physical page's
# number. Blue tokens are visible to the next query, orange ones are drafts.

# %%
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle


def draw(table, title, drafts=0, window=geometry.window):
    """Draws each row's pages; pale: held, but out of the window or not filled."""
    _, axes = plt.subplots(figsize=(9, 1.6))

    def box(row, start, end, **style):
        axes.add_patch(Rectangle((start, row), max(0, end - start), 0.8, **style))

    for row, (pages, length) in enumerate(zip(table.pages.tolist(), table.lengths.tolist(), strict=True)):
        first, committed = max(0, length - drafts - window + 1), length - drafts
        for column, page in enumerate(pages):
            start, end = 64 * column, 64 * (column + 1)
            if page >= 0:
                box(row, start, end, color="#dbe7f5", lw=0)
                box(row, max(start, first), min(end, committed), color="#7fb0e0", lw=0)
                box(row, max(start, committed), min(end, length), color="#f08c2e", lw=0)
                axes.text(start + 32, row + 0.4, page, ha="center", va="center", fontsize=8)
            box(row, start, end, fill=False, ec="#7a8899", lw=0.8)
    axes.set(xlim=(0, 64 * table.num_columns), ylim=(table.num_rows, -0.1), xlabel="position", title=title)
    axes.set_xticks(range(0, 64 * table.num_columns + 1, 64))
    axes.set_yticks([row + 0.4 for row in range(table.num_rows)], [f"row {row}" for row in range(table.num_rows)])
    axes.spines[:].set_visible(False)
    plt.show()


draw(table, "before the step: 574 and 70 tokens")

# %% [markdown]
# Grow by four, write the drafts' latents, decode. Row 0 takes a page for two of its drafts.

# %%
pool, grown, granted, _ = extend(pool, table, jnp.array([4, 4]))
drafts = 0.3 * jax.random.normal(jax.random.key(2), (2, 4, geometry.latent_dim), jnp.bfloat16)
kv_pages = write_latent(kv_pages, grown, drafts)
q = jax.random.normal(jax.random.key(3), (2, 4, geometry.num_heads, geometry.latent_dim), jnp.bfloat16)
out = swa_latent_decode(
    q, kv_pages, grown, window=geometry.window, scale=geometry.softmax_scale, v_dim=geometry.kv_lora_rank
)
draw(grown, "during the step: 4 drafts in each row", drafts=4)
out.shape

# %% [markdown]
# Two of row 0's drafts are accepted and one of row 1's. The rest is rolled back, with the page that row 0 no longer
# needs. Then each page goes whose tokens no query to come can see: row 0's next query is at 576 and sees 64 and later,
# so its first page is free for others.

# %%
pool, kept = rollback(pool, grown, jnp.array([576, 71]))
pool, after = release_outside_window(pool, kept, geometry.window, kept.lengths)
draw(after, "after the step: 576 and 71 tokens")
after

# %% [markdown]
# Nothing was changed in place. The table of before the step still reads as it did, with the cache array of its time:

# %%
table

# %% [markdown]
# ## Pages have 64 tokens
#
# Page tables of other sizes exist, for engines that have them, but the decode refuses them before anything is compiled:

# %%
try:
    swa_latent_decode(
        q,
        kv_pages,
        PageTable.empty(2, 12, page_size=16),
        window=geometry.window,
        scale=geometry.softmax_scale,
        v_dim=geometry.kv_lora_rank,
    )
except RuntimeError as error:
    print(error)
