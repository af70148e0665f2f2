// Histograms to cumulative counts and masses.
#include "core/numeric.h"
#include "cuda/select/passes.h"

namespace scope::cuda {

namespace {

constexpr int kScanParts = 20;
static_assert(kBins / 4 % kScanParts == 0);

// 32 groups and 20 stretches of bins to a block. A word becomes keys up to its bin << 32 | mass below its bin, in f32:
// summed from the bottom, so that it resolves rho close to 1.
__global__ void __launch_bounds__(kLanes* kScanParts) scan_histograms(ProxyLaunch p, SelectSpace s, Bins bins) {
  __shared__ int first_bin[kScanParts][kLanes];
  __shared__ uint32_t keys[kScanParts][kLanes];
  __shared__ float masses[kScanParts][kLanes], squares[kScanParts][kLanes];
  const int blocks = (p.groups + kLanes - 1) / kLanes, lane = threadIdx.x % kLanes, part = threadIdx.x / kLanes;
  const int64_t head = blockIdx.x / blocks;
  const int block = blockIdx.x % blocks, group = block * kLanes + lane, size = bins.count / kScanParts;
  unsigned long long* words = s.histogram[head] + (int64_t{block} * bins.count + part * size) * kLanes + lane;

  uint32_t count = 0;
  int first = bins.count;
  for (int b = size - 1; b >= 0; --b) {
    const auto n = static_cast<uint32_t>(words[b * kLanes] >> 32);
    count += n;
    if (n != 0) first = part * size + b;
  }
  first_bin[part][lane] = first;
  keys[part][lane] = count;
  __syncthreads();
  uint32_t keys_before = 0;
  for (int i = 0; i < kScanParts; ++i) {
    first = min(first, first_bin[i][lane]);
    if (i < part) keys_before += keys[i][lane];
  }

  const float width = group < p.groups ? s.step[head][group] * static_cast<float>(1 << bins.sub_bits) : 0.0f;
  const float spread = fminf(width * width, 1.0f) / 24.0f;  // of masses inside a bin, at an even density
  float square = 0;
  const auto mass_of = [&](int b) {
    const unsigned long long word = words[b * kLanes];
    const auto n = static_cast<float>(static_cast<uint32_t>(word >> 32));
    if (n == 0) return 0.0f;
    const float moment = static_cast<float>(static_cast<uint32_t>(word)) / n;
    const float fraction = (moment + 0.5f) / (1 << kMomentBits);
    const float each = expf(-width * (static_cast<float>(part * size + b - first) + fraction)) * (1 + spread - spread / n);
    square += each * each * n;
    return each * n;
  };
  float sum = 0;
  for (int b = size - 1; b >= 0; --b) sum += mass_of(b);
  masses[part][lane] = sum;
  squares[part][lane] = square;
  __syncthreads();
  float below = 0;
  for (int i = kScanParts - 1; i > part; --i) below += masses[i][lane];
  uint32_t keys_up_to = keys_before + count;
  for (int b = size - 1; b >= 0; --b) {
    const auto n = static_cast<uint32_t>(words[b * kLanes] >> 32);
    const float mass = mass_of(b);
    words[b * kLanes] = static_cast<unsigned long long>(keys_up_to) << 32 | __float_as_uint(below);
    keys_up_to -= n;
    below += mass;
  }
  if (part != 0 || group >= p.groups) return;
  square = 0;
  for (int i = 0; i < kScanParts; ++i) square += squares[i][lane];
  s.mass[head][group] = below;
  s.blur[head][group] = sqrtf(square) / below;
}

}  // namespace

void scan_pass(const Exec& exec, const ProxyLaunch& p, const SelectSpace& s, Bins bins) {
  launch(exec, "scan_histograms", scan_histograms, p.heads * ceil_div(p.groups, kLanes), kLanes * kScanParts, 0, p, s, bins);
}

}  // namespace scope::cuda
