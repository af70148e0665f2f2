// Linear layers in fp8 as only a GPU shows them: rows rounded to e4m3, products with and without fast sums against float64,
// whole layers and models, and what is refused.
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>

#include "cases.h"
#include "cuda/cublaslt.h"
#include "cuda/device.h"
#include "cuda/video.h"
#include "methods/methods.h"
#include "video/footprint.h"

namespace scope::video {
namespace {

using cuda::Operands;
using test::Random;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();
constexpr int64_t kGuard = 64;  // bytes behind an array that nothing may touch
constexpr std::byte kPoison{0xa5};

double e4m3(std::byte byte) {
  const int bits = std::to_integer<int>(byte), exponent = bits >> 3 & 15, mantissa = bits & 7;
  if ((bits & 127) == 127) return kNan;
  const double size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return bits < 128 ? size : -size;
}

// Half the step between neighbours in e4m3 at x.
double half_step(double x) {
  return std::ldexp(1.0, std::max(x == 0 ? -6 : static_cast<int>(std::floor(std::log2(std::abs(x)))), -6) - 4);
}

// As the type stores them.
std::vector<double> stored(std::vector<double> values, DType type) {
  for (double& x : values) {
    x = static_cast<float>(x);
    if (type == DType::bf16) x = bf16_to_f32(f32_to_bf16(static_cast<float>(x)));
  }
  return values;
}

std::vector<double> normals(Random& random, int64_t n, double size = 1) {
  std::vector<double> out(static_cast<size_t>(n));
  for (double& x : out) x = size * random.normal();
  return out;
}

class FpEight : public testing::Test {
 protected:
  void SetUp() override {
    if (!find_backend("cuda").present()) GTEST_SKIP() << "[GPU tests skipped]";
    context_ = std::make_unique<Context>(ContextOptions{.backend = "cuda", .threads = 1});
    const cuda::Device& device = *context_->exec().device;
    if (device.major != 9) {
      EXPECT_TRUE(10 * device.major + device.minor >= 89 || refuses()) << device.name;
      GTEST_SKIP() << "[GPU tests skipped] e4m3 with scales of rows: sm_90";
    }
    plain_ = make_cuda_engine(*context_);
    fp8_ = make_cuda_engine(*context_, LinearMode::fp8);
    fast_ = make_cuda_engine(*context_, LinearMode::fp8_fast);
  }
  bool refuses() const {
    try {
      make_cuda_engine(*context_, LinearMode::fp8);
    } catch (const Error& error) {
      return error.status() == Status::unsupported && std::string(error.what()).find("fp8") != std::string::npos;
    }
    return false;
  }

  // Poisoned memory, with a guard behind it.
  Buffer poisoned(int64_t bytes) const {
    const Buffer memory = plain_->allocate(bytes + kGuard);
    const std::vector<std::byte> poison(static_cast<size_t>(bytes + kGuard), kPoison);
    plain_->upload(poison.data(), memory.get(), bytes + kGuard);
    return memory;
  }
  std::vector<std::byte> read_bytes(const Buffer& memory, int64_t bytes) const {
    for (Engine* engine : {fp8_.get(), fast_.get()}) engine->wait();
    std::vector<std::byte> host(static_cast<size_t>(bytes + kGuard));
    plain_->download(memory.get(), host.data(), bytes + kGuard);
    for (int64_t i = bytes; i < bytes + kGuard; ++i) EXPECT_EQ(host[static_cast<size_t>(i)], kPoison);
    host.resize(static_cast<size_t>(bytes));
    return host;
  }
  std::vector<double> read(const Buffer& memory, DType type, int64_t n) const {
    const std::vector<std::byte> host = read_bytes(memory, n * dtype_bytes(type));
    std::vector<double> out(static_cast<size_t>(n));
    for (size_t i = 0; i < out.size(); ++i) {
      float single = 0;
      uint16_t half = 0;
      if (type == DType::f32) {
        std::memcpy(&single, host.data() + 4 * i, 4);
      } else {
        std::memcpy(&half, host.data() + 2 * i, 2);
        single = bf16_to_f32(half);
      }
      out[i] = single;
    }
    return out;
  }
  Buffer upload(const std::vector<double>& values, DType type) const {
    const int64_t bytes = std::ssize(values) * dtype_bytes(type);
    std::vector<std::byte> host(static_cast<size_t>(bytes));
    for (size_t i = 0; i < values.size(); ++i) {
      const auto single = static_cast<float>(values[i]);
      const uint16_t half = f32_to_bf16(single);
      if (type == DType::f32) std::memcpy(host.data() + 4 * i, &single, 4);
      if (type == DType::bf16) std::memcpy(host.data() + 2 * i, &half, 2);
    }
    const Buffer memory = plain_->allocate(bytes);
    plain_->upload(host.data(), memory.get(), bytes);
    return memory;
  }

  // A matrix in e4m3: on the device, and as the numbers that it stands for.
  struct Rounded {
    Buffer bytes, scales;
    std::vector<double> scale, numbers;  // numbers: without their scales
  };
  Rounded round(const std::vector<double>& values, DType type, int64_t rows, int64_t columns) const {
    Rounded out{poisoned(rows * columns), poisoned(4 * rows), {}, {}};
    const Buffer x = upload(values, type);
    cuda::quantise_rows(plain_->stream, {x.get(), type, rows, columns}, static_cast<uint8_t*>(out.bytes.get()),
                        static_cast<float*>(out.scales.get()));
    out.scale = read(out.scales, DType::f32, rows);
    for (const std::byte byte : read_bytes(out.bytes, rows * columns)) out.numbers.push_back(e4m3(byte));
    return out;
  }

  std::unique_ptr<Weights> pack(Engine& engine, const std::vector<double>& values, int64_t out, int64_t in) const {
    io::Array matrix{io::ElementType::f32, {out, in}, std::vector<std::byte>(static_cast<size_t>(4 * out * in))};
    for (size_t i = 0; i < values.size(); ++i) {
      const auto x = static_cast<float>(values[i]);
      std::memcpy(matrix.data.data() + 4 * i, &x, 4);
    }
    auto weights = engine.pack(matrix, out, in);
    engine.quantise(*weights, "some.weight");
    return weights;
  }

  std::unique_ptr<Context> context_;
  std::unique_ptr<Engine> plain_, fp8_, fast_;
};

// Each number is the nearest that its row's scale leaves, and the largest of a row takes all of e4m3's range.
TEST_F(FpEight, RowsAreRounded) {
  Random random(1);
  constexpr double kSizes[] = {1, 0, 1e30, 1e-30, 0x1p-110, 3e38, 0.01};
  for (const DType type : {DType::bf16, DType::f32}) {
    for (const int64_t columns : {16, 48, 512, 528, 5120, 13824}) {
      const int64_t rows = columns == 48 ? 257 : 11;
      std::vector<double> values;
      for (int64_t r = 0; r < rows; ++r) {
        std::vector<double> row = normals(random, columns, kSizes[r % 7] / (r % 7 == 5 ? 4 : 1));
        if (r % 7 == 6) row[static_cast<size_t>(random.below(columns))] = 1e4;  // one that is a million times the others
        values.insert(values.end(), row.begin(), row.end());
      }
      values = stored(values, type);
      const Rounded found = round(values, type, rows, columns);
      for (int64_t r = 0; r < rows; ++r) {
        double most = 0;
        for (int64_t c = 0; c < columns; ++c) most = std::max(most, std::abs(values[static_cast<size_t>(r * columns + c)]));
        const float scale = most == 0 ? 1.0f : static_cast<float>(std::max(most, 0x1p-100)) / 448.0f;
        ASSERT_EQ(found.scale[static_cast<size_t>(r)], scale) << r;
        double largest = 0;
        for (int64_t c = 0; c < columns; ++c) {
          const auto i = static_cast<size_t>(r * columns + c);
          const double exact = values[i] / scale;
          ASSERT_NEAR(found.numbers[i], exact, half_step(exact) + 1e-6 * std::abs(exact)) << r << ", " << c;
          largest = std::max(largest, std::abs(found.numbers[i]));
        }
        if (most == 0 || most >= 0x1p-100) {
          ASSERT_EQ(largest, most == 0 ? 0 : 448) << r;
        }
      }
      const Rounded again = round(values, type, rows, columns);
      ASSERT_EQ(again.numbers, found.numbers);
    }
  }
}

TEST_F(FpEight, RowsThatAreNotFiniteStaySo) {
  Random random(2);
  const int64_t rows = 9, columns = 1040;
  for (const DType type : {DType::bf16, DType::f32}) {
    std::vector<double> values = normals(random, rows * columns);
    values[static_cast<size_t>(2 * columns + columns - 1)] = kNan;
    values[static_cast<size_t>(5 * columns)] = -kInf;
    const Rounded found = round(values, type, rows, columns);
    for (int64_t r = 0; r < rows; ++r) {
      EXPECT_EQ(std::isnan(found.scale[static_cast<size_t>(r)]), r == 2 || r == 5) << r;
    }
  }
}

// A product in float64: each output, and the sum of its terms' sizes.
struct Sums {
  std::vector<double> sum, size;
};
Sums multiply(const std::vector<double>& x, const std::vector<double>& w, int64_t rows, int64_t columns, int64_t depth) {
  Sums out;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const double *a = x.data() + r * depth, *b = w.data() + c * depth;
      double sum = 0, size = 0;
      for (int64_t k = 0; k < depth; ++k) {
        sum += a[k] * b[k];
        size += std::abs(a[k] * b[k]);
      }
      out.sum.push_back(sum);
      out.size.push_back(size);
    }
  }
  return out;
}

// What outputs miss of float64: the largest as a share of the sum of its terms' sizes, but for the rounding of the output
// itself; and the root mean square as a share of the row's outputs, so that rows of very different sizes count alike.
struct Difference {
  double largest = 0, mean = 0;
};
Difference difference(const std::vector<double>& got, const Sums& want, const std::vector<double>& bias, int64_t columns,
                      DType type) {
  Difference out;
  double errors = 0, rows = 0;
  for (size_t first = 0; first < got.size(); first += static_cast<size_t>(columns)) {
    double row_error = 0, row_output = 0;
    for (size_t c = 0; c < static_cast<size_t>(columns); ++c) {
      const double added = bias.empty() ? 0 : bias[c], exact = want.sum[first + c] + added,
                   size = want.size[first + c] + std::abs(added);
      const double error = std::abs(got[first + c] - exact);
      const double rounding = (type == DType::bf16 ? 0x1p-8 : 0x1p-23) * std::abs(exact);
      out.largest = std::isnan(error) ? kInf : std::max(out.largest, size == 0 ? error : (error - rounding) / size);
      row_error += error * error;
      row_output += exact * exact;
    }
    if (row_output > 0) {
      errors += row_error / row_output;
      rows += 1;
    }
  }
  out.mean = rows == 0 ? 0 : std::sqrt(errors / rows);
  return out;
}

// The bound of one output, as a share of the sum of its terms' sizes: what a wrong scale or a missing row exceeds many
// times.
double most_error(Operands operands) {
  return operands == Operands::bf16 ? 0x1p-16 : operands == Operands::e4m3 ? 0x1p-10 : 0x1p-9;
}

TEST_F(FpEight, ProductsAgainstFloat64) {
  Random random(3);
  cuda::CublasLt products;
  const std::array<int64_t, 3> shapes[] = {{1, 16, 16},    {7, 48, 32},     {257, 16, 48},    {97, 272, 528},
                                           {1, 256, 5120}, {131, 64, 5120}, {129, 128, 13824}};
  for (const auto& [rows, columns, depth] : shapes) {
    std::vector<double> x_values, w_values;
    for (int64_t r = 0; r < rows; ++r) {  // tokens of very different sizes, and some of zeros
      const auto row = normals(random, depth, r % 5 == 4 ? 0 : std::pow(10.0, static_cast<double>(random.between(-12, 12))));
      x_values.insert(x_values.end(), row.begin(), row.end());
    }
    for (int64_t c = 0; c < columns; ++c) {
      const auto row = normals(random, depth, c % 7 == 6 ? 0 : std::pow(10.0, static_cast<double>(random.between(-4, 4))));
      w_values.insert(w_values.end(), row.begin(), row.end());
    }
    const Rounded x = round(stored(x_values, DType::bf16), DType::bf16, rows, depth);
    const Rounded w = round(stored(w_values, DType::bf16), DType::bf16, columns, depth);
    std::vector<double> exact_x = x.numbers, exact_w = w.numbers;
    for (size_t i = 0; i < exact_x.size(); ++i) exact_x[i] *= x.scale[i / static_cast<size_t>(depth)];
    for (size_t i = 0; i < exact_w.size(); ++i) exact_w[i] *= w.scale[i / static_cast<size_t>(depth)];
    const Sums exact = multiply(exact_x, exact_w, rows, columns, depth);
    const std::vector<double> bias_values = stored(normals(random, columns), DType::bf16);
    const Buffer bias = upload(bias_values, DType::bf16);
    for (const Operands operands : {Operands::e4m3, Operands::e4m3_fast}) {
      for (const bool biased : {false, true}) {
        const Buffer out = poisoned(rows * columns * 2);
        const cuda::Product product{rows, columns, depth, DType::bf16, biased, false, operands};
        const cuda::ProductArrays at{w.bytes.get(),
                                     x.bytes.get(),
                                     biased ? bias.get() : nullptr,
                                     out.get(),
                                     static_cast<const float*>(w.scales.get()),
                                     static_cast<const float*>(x.scales.get())};
        if (!products.has(product, at)) {
          EXPECT_TRUE(biased && columns < depth / 100)
              << "cuBLASLt may lack a bias where sums would be cut for so few outputs";
          continue;
        }
        const auto run = [&] {
          products.multiply(plain_->stream, product, at);
          return read(out, DType::bf16, rows * columns);
        };
        const auto got = run();
        const Difference found = difference(got, exact, biased ? bias_values : std::vector<double>{}, columns, DType::bf16);
        EXPECT_LE(found.largest, most_error(operands))
            << rows << " x " << depth << " -> " << columns << (operands == Operands::e4m3 ? "" : ", fast");
        EXPECT_EQ(run(), got) << "products repeat";
      }
    }
  }
}

// What sums of e4m3 lose, at the depths of Wan 14B: printed for the table.
TEST_F(FpEight, WhatSumsLose) {
  Random random(4);
  cuda::CublasLt products;
  const int64_t rows = 129, columns = 128;
  for (const int64_t depth : {512, 5120, 13824}) {
    const auto x_values = stored(normals(random, rows * depth), DType::bf16),
               w_values = stored(normals(random, columns * depth), DType::bf16);
    const Rounded x = round(x_values, DType::bf16, rows, depth), w = round(w_values, DType::bf16, columns, depth);
    const Buffer x_bf16 = upload(x_values, DType::bf16), w_bf16 = upload(w_values, DType::bf16);
    std::vector<double> exact_x = x.numbers, exact_w = w.numbers;
    for (size_t i = 0; i < exact_x.size(); ++i) exact_x[i] *= x.scale[i / static_cast<size_t>(depth)];
    for (size_t i = 0; i < exact_w.size(); ++i) exact_w[i] *= w.scale[i / static_cast<size_t>(depth)];
    const Sums of_bf16 = multiply(x_values, w_values, rows, columns, depth),
               of_bytes = multiply(exact_x, exact_w, rows, columns, depth);
    for (const Operands operands : {Operands::bf16, Operands::e4m3, Operands::e4m3_fast}) {
      const bool bytes = operands != Operands::bf16;
      const cuda::ProductArrays at{bytes ? w.bytes.get() : w_bf16.get(),
                                   bytes ? x.bytes.get() : x_bf16.get(),
                                   nullptr,
                                   nullptr,
                                   bytes ? static_cast<const float*>(w.scales.get()) : nullptr,
                                   bytes ? static_cast<const float*>(x.scales.get()) : nullptr};
      for (const DType type : {DType::f32, DType::bf16}) {  // bf16 outputs hide what sums lose, and every library has them
        const cuda::Product product{rows, columns, depth, type, false, false, operands};
        if (!products.has(product, at)) {
          EXPECT_EQ(type, DType::f32) << "a layer's outputs are bf16";
          std::printf("depth %lld: no such product into %s\n", static_cast<long long>(depth), dtype_name(type));
          continue;
        }
        const Buffer out = poisoned(rows * columns * dtype_bytes(type));
        cuda::ProductArrays to = at;
        to.out = out.get();
        products.multiply(plain_->stream, product, to);
        const auto got = read(out, type, rows * columns);
        const Difference sums = difference(got, bytes ? of_bytes : of_bf16, {}, columns, type),
                         all = difference(got, of_bf16, {}, columns, type);
        const char* name = operands == Operands::bf16 ? "bf16" : operands == Operands::e4m3 ? "fp8" : "fp8-fast";
        std::printf("depth %lld, %s into %s: sums lose %.2e of the outputs' size, with the rounding of operands %.2e\n",
                    static_cast<long long>(depth), name, dtype_name(type), sums.mean, all.mean);
        RecordProperty(fmt::format("{}_{}_{}", name, dtype_name(type), depth), fmt::format("{:.3e}", sums.mean));
        EXPECT_LE(sums.largest, most_error(operands)) << name << ", " << depth;
        EXPECT_LE(sums.mean, operands == Operands::e4m3_fast ? 0x1p-6
                             : type == DType::bf16           ? 0x1p-8
                                                             : 0x1p-10)
            << name << ", " << depth;
        EXPECT_LE(all.mean, bytes ? 0x1p-4 : 0x1p-8) << name << ", " << depth;
      }
    }
  }
}

// A layer from weights and activations as they were: within what rounding each operand to its nearest in e4m3 can do.
TEST_F(FpEight, LayersAgainstFloat64) {
  Random random(5);
  for (const auto& [rows, in, out] : {std::array<int64_t, 3>{5, 64, 48}, {131, 256, 512}, {33, 1536, 96}}) {
    std::vector<double> w_values = normals(random, out * in);
    std::fill_n(w_values.begin() + in, in, 0.0);  // the second output is its bias alone
    w_values = stored(w_values, DType::bf16);
    const auto bias_values = stored(normals(random, out), DType::bf16);
    const Buffer bias = upload(bias_values, DType::f32);
    // The size of each number, and with the most that its rounding may add.
    const auto sizes_of = [](const std::vector<double>& values, const std::vector<double>& scale, int64_t columns) {
      std::pair<std::vector<double>, std::vector<double>> sizes;
      for (size_t i = 0; i < values.size(); ++i) {
        const double unit = scale[i / static_cast<size_t>(columns)], size = std::abs(values[i]);
        sizes.first.push_back(size);
        sizes.second.push_back(size + (size == 0 ? 0 : 1.001 * unit * half_step(size / unit)));
      }
      return sizes;
    };
    const auto [w_sizes, w_most] = sizes_of(w_values, round(w_values, DType::bf16, out, in).scale, in);
    for (const DType from : {DType::bf16, DType::f32}) {
      const auto x_values = stored(normals(random, rows * in, 100), from);
      const Buffer x = upload(x_values, from);
      const auto [x_sizes, x_most] = sizes_of(x_values, round(x_values, from, rows, in).scale, in);
      const Sums exact = multiply(x_values, w_values, rows, out, in), most = multiply(x_most, w_most, rows, out, in);
      for (Engine* engine : {fp8_.get(), fast_.get()}) {
        const auto weights = pack(*engine, w_values, out, in);
        for (const Activation then : {Activation::none, Activation::gelu_tanh, Activation::silu}) {
          const Buffer y = poisoned(rows * out * 2);
          engine->linear({weights.get(), static_cast<const float*>(bias.get())}, {x.get(), from, rows, in},
                         {y.get(), DType::bf16, rows, out}, then);
          const auto got = read(y, DType::bf16, rows * out);
          for (size_t i = 0; i < got.size(); ++i) {
            const double added = bias_values[i % static_cast<size_t>(out)], sum = exact.sum[i] + added;
            const double gelu = 0.5 * sum * (1 + std::tanh(std::sqrt(2 / M_PI) * (sum + 0.044715 * sum * sum * sum)));
            const double want = then == Activation::none   ? sum
                                : then == Activation::silu ? sum / (1 + std::exp(-sum))
                                                           : gelu;
            const double sums = most_error(Operands::e4m3_fast) * (most.size[i] + std::abs(added));
            // An activation is up to 1.13 times as steep as its input, which may be rounded to bf16 before.
            const double allowed =
                1.13 * (most.size[i] - exact.size[i] + sums + 0x1p-8 * std::abs(sum)) + 0x1p-8 * std::abs(want) + 2e-3;
            ASSERT_NEAR(got[i], want, allowed) << rows << " x " << in << ", " << i << ", " << static_cast<int>(then);
            if (then == Activation::none && i % static_cast<size_t>(out) == 1) {
              ASSERT_EQ(got[i], added);
            }
          }
        }
      }
    }
  }
}

TEST_F(FpEight, NonFiniteTokensGiveNan) {
  Random random(6);
  const int64_t rows = 37, in = 128, out = 64;
  const auto weights = pack(*fast_, normals(random, out * in), out, in);
  std::vector<double> values = normals(random, rows * in);
  const auto run = [&](Activation then) {
    const Buffer x = upload(values, DType::bf16), y = poisoned(rows * out * 2);
    fast_->linear({weights.get(), nullptr}, {x.get(), DType::bf16, rows, in}, {y.get(), DType::bf16, rows, out}, then);
    return read(y, DType::bf16, rows * out);
  };
  for (const Activation then : {Activation::none, Activation::gelu_tanh}) {
    values[3 * in + 5] = values[20 * in] = 1;
    const auto before = run(then);
    values[3 * in + 5] = kInf;
    values[20 * in] = kNan;
    const auto after = run(then);
    for (int64_t i = 0; i < rows * out; ++i) {
      const int64_t row = i / out;
      const auto at = static_cast<size_t>(i);
      if (row == 3 || row == 20) {
        ASSERT_TRUE(std::isnan(after[at])) << i;
      } else {
        ASSERT_EQ(after[at], before[at]) << i;
      }
    }
  }
}

TEST_F(FpEight, WeightsThatAreNotFiniteAreRefused) {
  Random random(7);
  for (const double bad : {kNan, kInf, -kInf}) {
    auto values = normals(random, 32 * 48);
    values[5 * 48 + 47] = bad;
    try {
      pack(*fp8_, values, 32, 48);
      FAIL() << bad;
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::non_finite);
      EXPECT_NE(std::string(error.what()).find("some.weight"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("row 5"), std::string::npos) << error.what();
    }
  }
}

TEST_F(FpEight, OddSizesStayInBf16) {
  Random random(8);
  for (const auto& [in, out] : {std::pair<int64_t, int64_t>{40, 32}, {32, 40}}) {
    const int64_t rows = 19;
    const auto values = normals(random, out * in), x_values = normals(random, rows * in);
    const Buffer x = upload(x_values, DType::bf16);
    const auto run = [&](Engine& engine) {
      const auto weights = pack(engine, values, out, in);
      const Buffer y = poisoned(rows * out * 2);
      engine.linear({weights.get(), nullptr}, {x.get(), DType::bf16, rows, in}, {y.get(), DType::bf16, rows, out});
      return read(y, DType::bf16, rows * out);
    };
    EXPECT_EQ(run(*fp8_), run(*plain_));
    EXPECT_EQ(fp8_->not_quantised.at({in, out}), 1);
  }
  EXPECT_TRUE(plain_->not_quantised.empty());
}

TEST_F(FpEight, TimesNameTheirOperands) {
  Random random(9);
  const int64_t rows = 300, in = 256, out = 128;
  const auto weights = pack(*fp8_, normals(random, out * in), out, in), odd = pack(*fp8_, normals(random, 24 * in), 24, in);
  const Buffer x = upload(normals(random, rows * in), DType::bf16), y = poisoned(rows * out * 2);
  fp8_->time_linear(true);
  for (int i = 0; i < 2; ++i) {
    fp8_->linear({weights.get(), nullptr}, {x.get(), DType::bf16, rows, in}, {y.get(), DType::bf16, rows, out});
  }
  fp8_->linear({odd.get(), nullptr}, {x.get(), DType::bf16, rows, in}, {y.get(), DType::bf16, rows, 24});
  fp8_->time_linear(false);
  const LinearTimes times = fp8_->take_linear_times();
  ASSERT_EQ(times.size(), 2u);
  const LinearTime& fp8 = times.at({rows, out, in, DType::bf16, true});
  EXPECT_EQ(fp8.calls, 2);
  EXPECT_GT(fp8.seconds, 0);
  EXPECT_EQ(times.at({rows, 24, in, DType::bf16}).calls, 1);
  const auto algorithms = fp8_->time_algorithms({rows, out, in, DType::bf16, true});
  EXPECT_GT(algorithms.size(), 1u);
  for (const double seconds : algorithms) EXPECT_GT(seconds, 0);
}

// A model of drawn weights: finite, repeatable, near to bf16 and not the same, and as large as was foretold.
TEST_F(FpEight, WholeModels) {
  const std::string config =
      R"({"_class_name": "WanTransformer3DModel", "num_attention_heads": 2, "attention_head_dim": 64, "num_layers": 3,
          "ffn_dim": 256, "text_dim": 40, "in_channels": 16, "out_channels": 16, "freq_dim": 32, "eps": 1e-6,
          "qk_norm": "rms_norm_across_heads"})";
  constexpr std::array<int64_t, 3> kGrid = {3, 4, 5};
  const auto run = [&](Engine& engine) {
    const auto model = make_model(config, drawn_tensors(1), engine);
    const auto pass = model->start(kGrid, false);
    pass->add_prompt({make_noise(1, 7 * 40), {}, {}, 6});
    pass->set_timesteps(std::vector<double>{900, 500});
    SelfAttention attention(engine, model->config(), find_method("dense").settings(), kGrid, 1);
    const auto size = latent_size(model->config(), kGrid);
    const int64_t n = 16 * size[0] * size[1] * size[2];
    const Buffer latent = uploaded(engine, make_noise(3, n)), velocity = engine.allocate(n * 4);
    pass->forward(
        1, 0, static_cast<float*>(latent.get()), nullptr,
        [&](int64_t layer, Matrix q, Matrix k, Matrix v, Matrix out, const TextTokens& text) {
          attention.run({layer, 1, 2}, 0, q, k, v, out, text);
        },
        static_cast<float*>(velocity.get()));
    std::vector<float> host(static_cast<size_t>(n));
    engine.download(velocity.get(), host.data(), n * 4);
    return host;
  };
  const auto plain = run(*plain_);
  for (Engine* engine : {fp8_.get(), fast_.get()}) {
    const auto fp8 = run(*engine);
    double error = 0, size = 0;
    for (size_t i = 0; i < plain.size(); ++i) {
      error += std::pow(fp8[i] - plain[i], 2);
      size += std::pow(plain[i], 2);
    }
    std::printf("a model's velocity moves by %.3f of itself\n", std::sqrt(error / size));
    EXPECT_GT(std::sqrt(error / size), 1e-4);
    EXPECT_LT(std::sqrt(error / size), 0.2);
    EXPECT_EQ(run(*engine), fp8) << "passes repeat";
    EXPECT_TRUE(engine->not_quantised.empty());
    const int64_t dim = 128, wide = 256, weights = 8 * dim * dim + 2 * dim * wide, channels = 9 * dim + wide;
    EXPECT_EQ(model_bytes(config, *plain_, kGrid, false) - model_bytes(config, *engine, kGrid, false),
              3 * (weights - 4 * channels) - 60 * (wide + 4));
  }
}

}  // namespace
}  // namespace scope::video
