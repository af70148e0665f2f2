// encode on the CPU: one K-means per channel subset, or the means of key blocks.
#include "stages/encode.h"

#include <algorithm>

#include "core/numeric.h"
#include "cpu/blocks.h"
#include "cpu/kernels.h"
#include "stages/choices.h"
#include "stages/kmeans.h"

namespace scope::cpu {

namespace {

struct Layout {
  int32_t* sizes;    // [codes]
  int32_t* order;    // [tokens]
  int64_t* offsets;  // [codes + 1]
  Scratch kmeans;
  float* means;       // [codes, dim] of the blocks
  float* centre;      // [dim] of all keys
  float* row_buffer;  // [threads, padded dim]

  Layout(Arena arena, const Exec& exec, int64_t tokens, int64_t dim, int64_t codes, int64_t* bytes = nullptr) {
    sizes = arena.take<int32_t>(codes);
    order = arena.take<int32_t>(tokens);
    offsets = arena.take<int64_t>(codes + 1);
    kmeans.bytes = kmeans_scratch(exec, tokens, dim, codes);
    Arena shared = arena;  // blocks need no K-means
    kmeans.data = arena.take<std::byte>(kmeans.bytes);
    means = shared.take<float>(codes * dim);
    centre = shared.take<float>(dim);
    row_buffer = shared.take<float>(exec.pool->threads() * round_up(dim, kLanes));
    if (shared.used() > arena.used()) arena = shared;
    if (bytes != nullptr) *bytes = arena.used();
  }
};

void encode_blocks(const Exec& exec, const EncodeArgs& args, int64_t head, const Layout& at) {
  const int64_t dim = args.k.dim;
  for (int64_t r = 0; r <= args.codes; ++r) at.offsets[r] = std::min(r * args.block, args.count);
  const BlocksArgs blocks{
      .x = args.k[head], .rows = args.rows, .blocks = args.codes, .offsets = at.offsets, .row_buffer = at.row_buffer};
  block_means(exec, blocks, at.means);
  for (int64_t k = 0; k < dim; ++k) {
    double sum = 0;
    for (int64_t r = 0; r < args.codes; ++r) {
      sum += static_cast<double>(at.offsets[r + 1] - at.offsets[r]) * static_cast<double>(at.means[r * dim + k]);
    }
    at.centre[k] = row(args.encoding).means ? 0.0f : static_cast<float>(sum / static_cast<double>(args.count));
  }
  float* codebook = args.codebooks[head];
  int32_t* label = args.labels[head];
  for (const auto& channels : *args.partition) {
    for (int64_t r = 0; r < args.codes; ++r) {
      for (const int32_t channel : channels) *codebook++ = at.means[r * dim + channel] - at.centre[channel];
    }
    for (int64_t j = 0; j < args.count; ++j) *label++ = static_cast<int32_t>(j / args.block);
  }
  std::fill_n(args.empty[head], args.partition->size(), 0);
  if (args.similarity) block_similarity(exec, blocks, args.block, at.centre, args.similarity[head]);
}

void encode_by_kmeans(const Exec& exec, const EncodeArgs& args, int64_t head, const Layout& at) {
  float* codebook = args.codebooks[head];
  for (size_t m = 0; m < args.partition->size(); ++m) {
    const auto& channels = (*args.partition)[m];
    const auto depth = static_cast<int64_t>(channels.size());
    kmeans(exec, {.points = args.k[head],
                  .rows = args.rows,
                  .count = args.count,
                  .channels = channels.data(),
                  .depth = depth,
                  .clusters = args.codes,
                  .iterations = args.iterations,
                  .sample = args.sample,
                  .full_iterations = args.full_iterations,
                  .draw = args.draw,
                  .warm = args.warm,
                  .random = {.seed = args.seed, .tensor = 1, .subspace = static_cast<uint32_t>(m)},
                  .centroids = codebook,
                  .labels = args.labels[head] + static_cast<int64_t>(m) * args.count,
                  .sizes = at.sizes,
                  .order = at.order,
                  .offsets = at.offsets,
                  .scratch = at.kmeans});
    args.empty[head][m] = std::count(at.sizes, at.sizes + args.codes, 0);
    codebook += args.codes * depth;
  }
}

}  // namespace

int64_t encode_scratch(const Exec& exec, const Sizes& sizes) {
  int64_t bytes = 0;
  Layout(Arena(), exec, sizes.k_tokens, sizes.dim, sizes.codes, &bytes);
  return bytes;
}

void encode(const Exec& exec, const EncodeArgs& args) {
  const Layout at(Arena(args.scratch.data, args.scratch.bytes), exec, args.count, args.k.dim, args.codes);
  for (int64_t h = 0; h < args.heads; ++h) {
    switch (args.encoding) {
      case Encoding::kmeans:
        encode_by_kmeans(exec, args, h, at);
        break;
      case Encoding::blocks:
      case Encoding::means:
        encode_blocks(exec, args, h, at);
        break;
      case Encoding::cocluster:
        fail(Status::internal, "encode: got cocluster, which is a stage of its own");
    }
  }
}

}  // namespace scope::cpu
