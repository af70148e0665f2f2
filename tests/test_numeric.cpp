// The numbers below every stage: 16-bit floats, checked sizes, shares in millionths, Philox, bitmasks and the arena.
#include <gtest/gtest.h>

#include <map>

#include "core/numeric.h"
#include "core/random.h"
#include "core/tensor.h"
#include "cpu/kernels.h"

namespace scope {
namespace {

// Every finite 16-bit value by size, for the non-negative half.
std::map<double, uint16_t> values(float (*decode)(uint16_t), uint16_t infinity) {
  std::map<double, uint16_t> all;
  for (uint16_t bits = 0; bits < infinity; ++bits) all[static_cast<double>(decode(bits))] = bits;
  return all;
}

// Nearest value, ties to the even one: by search, not by bit tricks.
uint16_t nearest(const std::map<double, uint16_t>& all, float x, uint16_t infinity, double overflow) {
  const double magnitude = std::abs(static_cast<double>(x));
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (magnitude >= overflow) return sign | infinity;
  const auto above = all.lower_bound(magnitude);
  if (above == all.end()) return static_cast<uint16_t>(sign | all.rbegin()->second);
  if (above->first == magnitude || above == all.begin()) return sign | above->second;
  const auto below = std::prev(above);
  const double up = above->first - magnitude, down = magnitude - below->first;
  const bool take_up = up < down || (up == down && above->second % 2 == 0);
  return sign | (take_up ? above->second : below->second);
}

void expect_conversion(float (*decode)(uint16_t), uint16_t (*encode)(float), uint16_t infinity) {
  const auto all = values(decode, infinity);
  // Overflow begins half a step past the largest finite value.
  const double last = all.rbegin()->first, overflow = last + (last - std::next(all.rbegin())->first) / 2;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float x = decode(static_cast<uint16_t>(bits));
    if ((bits & 0x7fff) > infinity) {
      ASSERT_TRUE(std::isnan(x) && std::isnan(decode(encode(x)))) << bits;
    } else {
      ASSERT_EQ(encode(x), bits);
    }
    if (!std::isfinite(x)) continue;
    // Halfway to the next value, and one f32 step to either side of it.
    const float next = decode(static_cast<uint16_t>(bits + 1));
    const float half = std::isfinite(next) ? x + (next - x) / 2 : static_cast<float>(std::copysign(overflow, x));
    for (const float y : {half, std::nextafter(half, 0.0f), std::nextafter(half, 2 * half)}) {
      ASSERT_EQ(encode(y), nearest(all, y, infinity, overflow)) << y;
    }
  }
  const RandomStream random{.seed = 1};
  for (uint64_t i = 0; i < 200'000; ++i) {
    const auto x = std::bit_cast<float>(static_cast<uint32_t>(random.bits(i)));
    if (!std::isnan(x)) {
      ASSERT_EQ(encode(x), nearest(all, x, infinity, overflow)) << x;
    }
  }
  EXPECT_TRUE(std::isnan(decode(encode(std::bit_cast<float>(0x7f800001u))))) << "a NaN whose payload is all in the low bits";
}

TEST(Numeric, F16RoundsToNearestEvenAndOverflowsToInfinity) { expect_conversion(f16_to_f32, f32_to_f16, 0x7c00); }
TEST(Numeric, Bf16RoundsToNearestEvenAndKeepsNan) { expect_conversion(bf16_to_f32, f32_to_bf16, 0x7f80); }

TEST(Numeric, CheckedSizesRefuseOverflow) {
  EXPECT_EQ(checked_mul(int64_t{1} << 31, int64_t{1} << 31, "n"), int64_t{1} << 62);
  EXPECT_THROW(checked_mul(int64_t{1} << 32, int64_t{1} << 31, "n"), Error);
  EXPECT_EQ(checked_add((int64_t{1} << 62) - 1, int64_t{1} << 62, "n"), std::numeric_limits<int64_t>::max());
  EXPECT_THROW(checked_add(int64_t{1} << 62, int64_t{1} << 62, "n"), Error);
  try {
    checked_mul(int64_t{1} << 40, int64_t{1} << 40, "tokens x dim");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::size_limit);
    EXPECT_NE(std::string(error.what()).find("tokens x dim"), std::string::npos);
  }
}

TEST(Numeric, SharesAreTheSameIntegersEverywhere) {
  EXPECT_EQ(ceil_share(0.1, 75'600), 7'560);  // 0.1 * 75,600 in double is 7,560.000000000001 on some paths
  EXPECT_EQ(ceil_share(0.1, 118'800), 11'880);
  EXPECT_EQ(ceil_share(0.1, 11), 2);
  EXPECT_EQ(ceil_share(0, 100), 0);
  EXPECT_EQ(ceil_share(1, 100), 100);
  EXPECT_EQ(ceil_share(0.000001, 1), 1);
  EXPECT_EQ(floor_share(0.2, 50), 10);
  EXPECT_EQ(floor_share(0.1, 50), 5);
  EXPECT_EQ(floor_share(0.2, 4), 0);
  EXPECT_EQ(ceil_div(7, 3), 3);
  EXPECT_EQ(round_up(16, 16), 16);
  EXPECT_EQ(round_up(17, 16), 32);
}

// The known answers published with Random123 for philox4x32-10.
TEST(Random, PhiloxKnownAnswers) {
  using Block = std::array<uint32_t, 4>;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}), (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Random, DrawsCoverTheirRangeEvenly) {
  const RandomStream random{.seed = 9};
  for (const int64_t n : {int64_t{1}, int64_t{7}, (int64_t{1} << 40) + 1}) {
    double mean = 0;
    for (uint64_t i = 0; i < 20'000; ++i) {
      const int64_t draw = random.index(i, n);
      ASSERT_TRUE(draw >= 0 && draw < n);
      mean += static_cast<double>(draw) / 20'000;
      ASSERT_TRUE(random.uniform(i) >= 0 && random.uniform(i) < 1);
    }
    EXPECT_NEAR(mean / static_cast<double>(n), 0.5 - 0.5 / static_cast<double>(n), 0.01) << n;
  }
}

TEST(Tensor, MaskBits) {
  uint32_t mask[3] = {};
  for (const int64_t j : {0, 31, 32, 63, 64}) set_mask_bit(mask, j);
  EXPECT_EQ(mask[0], 0x80000001u);
  EXPECT_EQ(mask[1], 0x80000001u);
  EXPECT_EQ(mask[2], 1u);
  EXPECT_TRUE(mask_bit(mask, 31) && mask_bit(mask, 64) && !mask_bit(mask, 30));
  EXPECT_EQ(mask_words(0), 0);
  EXPECT_EQ(mask_words(32), 1);
  EXPECT_EQ(mask_words(33), 2);
}

// Counting and cutting are the same code, so a block of the counted size always fits and a smaller one never does.
TEST(Tensor, ArenaRefusesAWorkspaceThatIsTooSmall) {
  const auto layout = [](Arena arena) {
    arena.take<char>(3);
    arena.take<double>(5);
    return arena.used();
  };
  const int64_t bytes = layout(Arena());
  EXPECT_EQ(bytes, 64 + 40);
  alignas(64) std::byte memory[128];
  EXPECT_EQ(layout(Arena(memory, bytes)), bytes);
  EXPECT_THROW(layout(Arena(memory, bytes - 1)), Error);
}

TEST(Tensor, Int32OffsetOverflowInViews) {
  const TensorView view{
      reinterpret_cast<void*>(64), DType::f16, 2, 3, 4, 8, int64_t{1} << 40, int64_t{1} << 33, int64_t{1} << 31};
  const RowsView head = view.head(1, 2);
  EXPECT_EQ(reinterpret_cast<intptr_t>(head.row(3)),
            64 + 2 * ((int64_t{1} << 40) + (int64_t{2} << 33) + (int64_t{3} << 31)));
}

// Rows of 16 numbers at a time get the bits that each number has alone: ties, both infinities and NaN too.
TEST(Bf16DotsOnCpu, RowsAreRoundedAsNumbersAre) {
  const cpu::AttendKernels* dots = cpu::bf16_dot_kernels();
  if (dots == nullptr) GTEST_SKIP() << "this CPU has no bf16 dot products";
  const cpu::Kernels& base = *cpu::instruction_sets().front().kernels;
  std::vector<float> row;
  for (const uint32_t bits : {0x3f800000u, 0x3f808000u, 0x3f818000u, 0x3f80ffffu, 0x80000001u, 0x7f7fffffu, 0x7f800000u,
                              0xff800000u, 0x7fc00000u, 0x7f800001u, 0xffffffffu, 0x00008000u}) {
    row.push_back(std::bit_cast<float>(bits));
  }
  while (row.size() < 50) row.push_back(1.0f / static_cast<float>(row.size()));
  for (const int64_t dim : {1, 15, 16, 17, 50}) {
    std::vector<uint16_t> packed(64, 0xabcd);
    const int32_t first = 0;
    dots->pack_q(base, {row.data(), DType::f32, 1, dim, dim}, &first, 1, packed.data(), 64);
    for (int64_t c = 0; c < dim; ++c) {
      const auto i = static_cast<size_t>(c);
      ASSERT_EQ(packed[i], f32_to_bf16(row[i])) << "number " << c << " of " << dim;
    }
  }
}

}  // namespace
}  // namespace scope
