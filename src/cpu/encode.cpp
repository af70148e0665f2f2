// encode on the CPU: one K-means per channel subset.
#include "stages/encode.h"

#include <algorithm>

#include "core/numeric.h"
#include "stages/kmeans.h"

namespace scope::cpu {

namespace {

struct Layout {
  int32_t* sizes;    // [codes]
  int32_t* order;    // [tokens]
  int64_t* offsets;  // [codes + 1]
  Scratch kmeans;

  Layout(Arena arena, const Exec& exec, int64_t tokens, int64_t dim, int64_t codes, int64_t* bytes = nullptr) {
    sizes = arena.take<int32_t>(codes);
    order = arena.take<int32_t>(tokens);
    offsets = arena.take<int64_t>(codes + 1);
    kmeans.bytes = kmeans_scratch(exec, tokens, dim, codes);
    kmeans.data = arena.take<std::byte>(kmeans.bytes);
    if (bytes != nullptr) *bytes = arena.used();
  }
};

}  // namespace

int64_t encode_scratch(const Exec& exec, int64_t tokens, int64_t dim, int64_t codes) {
  int64_t bytes = 0;
  Layout(Arena(), exec, tokens, dim, codes, &bytes);
  return bytes;
}

void encode(const Exec& exec, const EncodeArgs& args) {
  const Layout at(Arena(args.scratch.data, args.scratch.bytes), exec, args.count, args.k.dim, args.codes);
  float* codebook = args.codebooks;
  for (size_t m = 0; m < args.partition->size(); ++m) {
    const auto& channels = (*args.partition)[m];
    const auto depth = static_cast<int64_t>(channels.size());
    kmeans(exec, {.points = args.k,
                  .rows = args.rows,
                  .count = args.count,
                  .channels = channels.data(),
                  .depth = depth,
                  .clusters = args.codes,
                  .iterations = args.iterations,
                  .sample = args.sample,
                  .warm = args.warm,
                  .random = {.seed = args.seed, .tensor = 1, .subspace = static_cast<uint32_t>(m)},
                  .centroids = codebook,
                  .labels = args.labels + static_cast<int64_t>(m) * args.count,
                  .sizes = at.sizes,
                  .order = at.order,
                  .offsets = at.offsets,
                  .scratch = at.kmeans});
    args.empty[m] = std::count(at.sizes, at.sizes + args.codes, 0);
    codebook += args.codes * depth;
  }
}

}  // namespace scope::cpu
