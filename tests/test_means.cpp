// The tail's means of parts of groups against float64: each stage alone, and through whole calls.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "call_support.h"
#include "cases.h"
#include "reference.h"
#include "stages/split.h"

namespace scope::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// K-means inside one group in float64, from `starts` or the centroids given.
struct Parts64 {
  std::vector<std::vector<double>> centroids;  // [parts][dim]
  std::vector<int64_t> part_of;                // [members]

  Parts64(const std::vector<std::vector<double>>& members, int64_t parts, int rounds,
          const std::vector<std::vector<double>>* warm = nullptr)
      : part_of(members.size()) {
    const auto n = static_cast<int64_t>(members.size());
    for (int64_t u = 0; u < parts; ++u) {
      if (warm != nullptr) {
        centroids.push_back((*warm)[static_cast<size_t>(u)]);
      } else if (n > 0) {
        centroids.push_back(members[static_cast<size_t>((2 * u + 1) * n / (2 * parts))]);
      }
    }
    for (int round = 0; round < rounds && n > 0; ++round) {
      for (size_t i = 0; i < members.size(); ++i) part_of[i] = nearest(members[i]);
      update(members);
    }
  }

  double distance(const std::vector<double>& x, int64_t part) const {
    const auto& centroid = centroids[static_cast<size_t>(part)];
    double sum = 0;
    for (size_t c = 0; c < x.size(); ++c) sum += (x[c] - centroid[c]) * (x[c] - centroid[c]);
    return sum;
  }
  // By which the backend may err in that: see Limits.
  double error(const std::vector<double>& x, int64_t part) const {
    const auto& centroid = centroids[static_cast<size_t>(part)];
    double sum = 0;
    for (size_t c = 0; c < x.size(); ++c) {
      sum += (std::abs(x[c] - centroid[c]) + std::abs(x[c]) / 4) * std::abs(centroid[c]);
    }
    return limits().split * sum;
  }
  int64_t nearest(const std::vector<double>& x) const {
    double least = kInf;
    int64_t best = 0;
    for (int64_t u = 0; u < std::ssize(centroids); ++u) {
      const double here = distance(x, u);
      if (here < least * (1 - 1e-9)) least = here, best = u;
    }
    return best;
  }
  void update(const std::vector<std::vector<double>>& members) {
    for (size_t u = 0; u < centroids.size(); ++u) {
      std::vector<double> sum(centroids[u].size());
      double size = 0;
      for (size_t i = 0; i < members.size(); ++i) {
        if (part_of[i] != static_cast<int64_t>(u)) continue;
        for (size_t c = 0; c < sum.size(); ++c) sum[c] += members[i][c];
        ++size;
      }
      for (size_t c = 0; c < sum.size() && size > 0; ++c) centroids[u][c] = sum[c] / size;
    }
  }
};

// Queries in groups of any size, some of them empty.
struct SplitProblem {
  int64_t groups, parts;
  Rows q;
  std::vector<int32_t> order;
  std::vector<int64_t> offsets{0};
  std::vector<float> start;

  SplitProblem(Random& random, DType dtype, int64_t tokens, int64_t g, int64_t p, int64_t dim)
      : groups(g), parts(p), q(random, dtype, tokens, dim, 1.0) {
    std::vector<int32_t> label(static_cast<size_t>(tokens));
    for (int32_t& each : label) each = static_cast<int32_t>(random.below(groups + groups / 4 + 1));  // the last: none
    for (int64_t c = 0; c < groups; ++c) {
      for (int32_t t = 0; t < tokens; ++t) {
        if (label[static_cast<size_t>(t)] == c) order.push_back(t);
      }
      offsets.push_back(std::ssize(order));
    }
    for (int32_t t = 0; t < tokens; ++t) {
      if (label[static_cast<size_t>(t)] >= groups) order.push_back(t);
    }
    for (int64_t i = 0; i < groups * parts * dim; ++i) start.push_back(static_cast<float>(random.normal()));
  }
  std::vector<std::vector<double>> members(int64_t group) const {
    std::vector<std::vector<double>> rows;
    for (int64_t i = offsets[static_cast<size_t>(group)]; i < offsets[static_cast<size_t>(group) + 1]; ++i) {
      rows.emplace_back();
      for (int64_t c = 0; c < q.view().dim; ++c) {
        rows.back().push_back(reference::element(q.view(), order[static_cast<size_t>(i)], c));
      }
    }
    return rows;
  }
};

struct SplitOutput {
  Guarded<float> centroids;
  Guarded<int32_t> sizes, labels;

  // start: centroids; none: a cold start.
  SplitOutput(const Exec& exec, const SplitProblem& problem, int rounds, const std::vector<float>& start)
      : centroids(problem.groups * problem.parts * problem.q.view().dim),
        sizes(problem.groups * problem.parts),
        labels(problem.q.view().tokens) {
    std::copy(start.begin(), start.end(), centroids.data());
    SplitArgs args{.q = problem.q.view(),
                   .groups = problem.groups,
                   .parts = problem.parts,
                   .order = problem.order.data(),
                   .offsets = problem.offsets.data(),
                   .rounds = rounds,
                   .warm = !start.empty(),
                   .centroids = centroids.data(),
                   .sizes = sizes.data(),
                   .labels = labels.data()};
    GuardedScratch scratch(backend().split_scratch(exec, sizes_of(args)));
    args.scratch = scratch_of(scratch);
    run_split(exec, std::span(&args, 1));
  }
  std::vector<uint8_t> all() const { return joined_bytes(centroids, sizes, labels); }
};

// One round from `start`. A query has the nearest part, or one that is farther by no more than the backend may err.
void expect_round(const SplitProblem& problem, const std::vector<float>& start, const SplitOutput& found) {
  const int64_t dim = problem.q.view().dim;
  std::vector<bool> grouped(static_cast<size_t>(problem.q.view().tokens));
  for (int64_t c = 0; c < problem.groups; ++c) {
    std::vector<std::vector<double>> from;
    for (int64_t u = 0; u < problem.parts && !start.empty(); ++u) {
      const float* row = start.data() + (c * problem.parts + u) * dim;
      from.emplace_back(row, row + dim);
    }
    const auto members = problem.members(c);
    Parts64 parts(members, problem.parts, 0, start.empty() ? nullptr : &from);
    for (size_t i = 0; i < members.size(); ++i) {
      const int32_t token = problem.order[static_cast<size_t>(problem.offsets[static_cast<size_t>(c)]) + i];
      grouped[static_cast<size_t>(token)] = true;
      const int64_t part = found.labels[token] - c * problem.parts, nearest = parts.nearest(members[i]);
      ASSERT_TRUE(part >= 0 && part < problem.parts) << "token " << token;
      parts.part_of[i] = part;
      if (part == nearest) continue;
      const double least = parts.distance(members[i], nearest), further = parts.distance(members[i], part) - least;
      ASSERT_GT(further, 1e-9 * least) << "token " << token << ": a tie goes to part " << nearest << ", not " << part;
      ASSERT_LE(further, parts.error(members[i], part) + parts.error(members[i], nearest)) << "token " << token;
    }
    parts.update(members);
    for (int64_t u = 0; u < problem.parts; ++u) {
      const int64_t at = c * problem.parts + u;
      ASSERT_EQ(found.sizes[at], std::count(parts.part_of.begin(), parts.part_of.end(), u))
          << "group " << c << " part " << u;
      for (int64_t k = 0; k < dim; ++k) {
        const bool none = members.empty() && start.empty();
        const double mean = none ? 0 : parts.centroids[static_cast<size_t>(u)][static_cast<size_t>(k)];
        ASSERT_NEAR(found.centroids[at * dim + k], mean, 1e-5) << "group " << c << " part " << u << " channel " << k;
      }
    }
  }
  for (int64_t t = 0; t < problem.q.view().tokens; ++t) {
    ASSERT_EQ(found.labels[t] < 0, !grouped[static_cast<size_t>(t)]) << "token " << t;
    ASSERT_GE(found.labels[t], -1) << "token " << t;
  }
}

// Each round alone, and that all of them together are bitwise the same.
void expect_split(const Exec& exec, const SplitProblem& problem, int rounds, bool warm) {
  const std::vector<float> given = warm ? problem.start : std::vector<float>();
  std::vector<float> start = given;
  std::vector<uint8_t> last;
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(fmt::format("round {}", round));
    const SplitOutput found(exec, problem, 1, start);
    ASSERT_NO_FATAL_FAILURE(expect_round(problem, start, found));
    start = found.centroids.values();
    last = found.all();
  }
  EXPECT_TRUE(SplitOutput(exec, problem, rounds, given).all() == last);
}

TEST(Split, DifferentialAgainstFloat64) {
  each_machine([](const Exec& exec) {
    for (uint64_t seed = 0; seed < 60; ++seed) {
      SCOPED_TRACE(fmt::format("seed {}", seed));
      Random random(5000 + seed);
      // Groups of about 1 query and of hundreds, more than are loaded at a time.
      const int64_t groups = random.between(1, seed % 3 == 0 ? 200 : 5);
      const SplitProblem problem(random, random.pick(limits().dtypes), random.between(1, 600), groups,
                                 random.between(1, kMostParts), random.pick(limits().dims));
      ASSERT_NO_FATAL_FAILURE(expect_split(exec, problem, static_cast<int>(random.between(1, 4)), seed % 2 == 1));
    }
  });
}

TEST(Split, EqualQueriesGoToTheFirstPart) {
  each_machine([](const Exec& exec) {
    Random random(1);
    SplitProblem problem(random, limits().finest, 50, 1, 4, 24);
    for (int64_t t = 1; t < 50; ++t) problem.q.copy_row(t, 0);
    ASSERT_NO_FATAL_FAILURE(expect_split(exec, problem, 3, false));
  });
}

// On the CPU a call refuses such values.
TEST(SplitOnDevice, QueriesThatAreNotFiniteReachNoCentroid) {
  each_machine([](const Exec& exec) {
    for (const double poison : {std::numeric_limits<double>::quiet_NaN(), kInf, -kInf}) {
      Random random(2);
      SplitProblem problem(random, limits().finest, 150, 1, 5, 72);
      const auto at = problem.order.begin() + problem.offsets[1] / 2;
      const int32_t token = *at;
      problem.q.set(token, 70, poison);
      const SplitOutput found(exec, problem, 3, problem.start);
      EXPECT_EQ(found.labels[token], 0);
      std::rotate(at, at + 1, problem.order.end());  // out of the group
      --problem.offsets[1];
      const SplitOutput without(exec, problem, 3, problem.start);
      EXPECT_TRUE(found.sizes.values() == without.sizes.values());
      for (int64_t i = 0; i < found.centroids.size(); ++i) ASSERT_NEAR(found.centroids[i], without.centroids[i], 1e-5);
    }
  });
}

// Parts of groups with masks, and the keys they weigh: some groups drop nothing, and of some the sample has nothing.
struct MeansProblem {
  int64_t groups, each, tokens, dim;
  Rows k, v;
  std::vector<float> centroids;
  std::vector<float> share, log_mass;  // as keep leaves them
  std::vector<int32_t> rows, sizes;
  std::vector<uint32_t> kept;
  TailArgs args;

  MeansProblem(Random& random, DType dtype, int64_t g, int64_t p, int64_t n, int64_t d, int64_t stride)
      : groups(g), each(p), tokens(n), dim(d), k(random, dtype, n, d, 1.0), v(random, dtype, n, d, 1.0) {
    const int64_t words = mask_words(tokens);
    const double is_key = random.pick(std::vector<double>{0.9, 0.997, 1});  // gaps everywhere, in few words, nowhere
    for (int32_t t = 0; t < tokens; ++t) {
      if (t == 0 || random.chance(is_key)) rows.push_back(t);
    }
    for (int64_t i = 0; i < groups * each * dim; ++i) {
      centroids.push_back(static_cast<float>(reference::rounded(random.normal(), dtype)));
    }
    for (int64_t u = 0; u < groups * each; ++u) sizes.push_back(static_cast<int32_t>(random.below(3)));
    args.tail = Tail::means;
    args.parts.stride = stride;
    args.parts.phase = random.below(100);
    kept.assign(static_cast<size_t>(groups * words), 0u);
    for (int64_t c = 0; c < groups; ++c) {
      const double kept_share = c % 5 == 0 ? 1.0 : random.uniform();
      size_t count = 0;
      for (size_t j = 0; j < rows.size(); ++j) {
        const bool missed = c % 5 == 1 && sampled(j);
        if (!missed && random.uniform() >= kept_share) continue;
        set_mask_bit(kept.data() + c * words, rows[j]);
        ++count;
      }
      share.push_back(count == rows.size() ? 0.0f : static_cast<float>(0.1 + 0.8 * random.uniform()));
      log_mass.push_back(static_cast<float>(random.normal()));
    }
    args.proxy = {.kind = ProxyKind::codes,  // whatever scores the keys, parts multiply them
                  .groups = groups,
                  .count = static_cast<int64_t>(rows.size()),
                  .scale = 1.0f / std::sqrt(static_cast<float>(dim)),
                  .centroids = {},
                  .k = k.view(),
                  .rows = rows.data()};
    args.v = v.view();
    args.kept = kept.data();
    args.weight = 0.1 + 0.9 * random.uniform();
    args.parts.each = each;
    args.parts.centroids = centroids.data();
    args.parts.sizes = sizes.data();
    args.parts.log_mass = log_mass.data();
    args.rows = groups + 1;
  }
  MeansProblem(const MeansProblem&) = delete;
  MeansProblem& operator=(const MeansProblem&) = delete;

  bool sampled(size_t key) const {
    return static_cast<int64_t>(key) % args.parts.stride == args.parts.phase % args.parts.stride;
  }
  double logit(int64_t part, size_t key) const {
    double sum = 0;
    for (int64_t c = 0; c < dim; ++c) {
      sum +=
          static_cast<double>(centroids[static_cast<size_t>(part * dim + c)]) * reference::element(k.view(), rows[key], c);
    }
    return sum * static_cast<double>(args.proxy.scale);
  }
};

struct MeansOutput {
  Guarded<float> value, share;
  GuardedScratch scratch;
  TailArgs args;
  MeansOutput(const Exec& exec, const MeansProblem& problem)
      : value(problem.groups * problem.each * problem.dim),
        share(problem.groups + 1),
        scratch(backend().tail_scratch(exec, sizes_of(problem.args))),
        args(problem.args) {
    std::copy(problem.share.begin(), problem.share.end(), share.data());
    args.value = value.data();
    args.share = share.data();
    args.scratch = scratch_of(scratch);
  }
  std::vector<uint8_t> all() const { return joined_bytes(value, share); }
};

void expect_means(const Exec& exec, const MeansProblem& problem) {
  const bool bf16_dots = problem.args.v.dtype == DType::bf16 && exec.attend_kernels_bf16 != nullptr;
  const double rounding = bf16_dots ? 0x1p-5 : limits().tail_mean;
  MeansOutput found(exec, problem);
  run_tail(exec, std::span(&found.args, 1));
  ASSERT_EQ(found.share[problem.groups], 0);
  for (int64_t u = 0; u < problem.groups * problem.each; ++u) {
    const int64_t group = u / problem.each;
    const auto dropped = [&](size_t j) {
      return !mask_bit(problem.kept.data() + group * mask_words(problem.tokens), problem.rows[j]);
    };
    double all = 0, in_sample = 0;
    for (size_t j = 0; j < problem.rows.size(); ++j) {
      all += dropped(j) ? 1 : 0;
      in_sample += dropped(j) && problem.sampled(j) ? 1 : 0;
    }
    const bool lives = problem.sizes[static_cast<size_t>(u)] > 0 && all > 0;
    double mass = 0;
    std::vector<double> mean(static_cast<size_t>(problem.dim)), square(mean);
    for (size_t j = 0; lives && j < problem.rows.size(); ++j) {
      if (!dropped(j) || (in_sample > 0 && !problem.sampled(j))) continue;
      const double weight = std::exp(problem.logit(u, j));
      mass += weight;
      for (int64_t c = 0; c < problem.dim; ++c) {
        const double term = weight * reference::element(problem.v.view(), problem.rows[j], c);
        mean[static_cast<size_t>(c)] += term;
        square[static_cast<size_t>(c)] += term * term;
      }
    }
    const double share = problem.args.weight * static_cast<double>(problem.share[static_cast<size_t>(group)]);
    ASSERT_NEAR(found.share[group], share, 1e-6) << "group " << group;
    for (int64_t c = 0; c < problem.dim; ++c) {
      const double want = lives ? mean[static_cast<size_t>(c)] / mass : 0;
      const double size = lives ? std::sqrt(square[static_cast<size_t>(c)]) / mass : 0;
      ASSERT_NEAR(found.value[u * problem.dim + c], want, rounding * size + 2e-5) << "part " << u << " channel " << c;
    }
  }
}

TEST(PartMeans, DifferentialAgainstFloat64) {
  each_machine([](const Exec& exec) {
    for (uint64_t seed = 0; seed < 120; ++seed) {
      SCOPED_TRACE(fmt::format("seed {}", seed));
      Random random(6000 + seed);
      // More parts than a block of threads has, and strides past the number of keys.
      const MeansProblem problem(random, random.pick(limits().dtypes), random.between(1, seed % 4 == 0 ? 60 : 12),
                                 random.between(1, 5), random.between(1, seed % 5 == 0 ? 1500 : 300),
                                 random.pick(limits().dims), random.pick(std::vector<int64_t>{1, 2, 3, 4, 7, 8, 16, 64}));
      ASSERT_NO_FATAL_FAILURE(expect_means(exec, problem));
    }
  });
}

// So heads may be spread over GPUs.
TEST(PartMeans, AHeadAloneIsWhatItIsAmongOthers) {
  each_machine([](const Exec& exec) {
    Random random(8);
    MeansProblem problem(random, limits().finest, 9, 2, 200, 24, 5);
    MeansOutput first(exec, problem), second(exec, problem);
    run_tail(exec, std::vector{first.args, second.args});
    MeansOutput alone(exec, problem);
    run_tail(exec, std::span(&alone.args, 1));
    EXPECT_TRUE(alone.all() == first.all());
    EXPECT_TRUE(alone.all() == second.all());
  });
}

TEST(PartMeansOnCpu, WithoutRoomForTheMatrixTheBitsAreTheSame) {
  each_machine([](const Exec& exec) {
    Random random(7);
    const MeansProblem problem(random, DType::f32, 90, 3, 900, 32, 4);
    Exec narrow = exec;
    narrow.proxy_floats = 0;
    MeansOutput wide(exec, problem), rows(narrow, problem);
    run_tail(exec, std::span(&wide.args, 1));
    run_tail(narrow, std::span(&rows.args, 1));
    EXPECT_TRUE(wide.all() == rows.all());
  });
}

// On the CPU a call refuses such values.
TEST(PartMeansOnDevice, KeptValuesDoNotReachTheMean) {
  each_machine([](const Exec& exec) {
    for (const double poison : {std::numeric_limits<double>::quiet_NaN(), kInf}) {
      Random random(9);
      MeansProblem problem(random, limits().finest, 6, 3, 400, 64, 4);
      MeansOutput clean(exec, problem), poisoned(exec, problem);
      run_tail(exec, std::span(&clean.args, 1));
      const int32_t token = problem.rows[problem.rows.size() / 2];
      for (int64_t c = 0; c < problem.groups; ++c) {
        uint32_t* mask = problem.kept.data() + c * mask_words(problem.tokens);
        if (mask_bit(mask, token)) continue;
        set_mask_bit(mask, token);
      }
      run_tail(exec, std::span(&clean.args, 1));
      for (int64_t c = 0; c < problem.dim; ++c) problem.v.set(token, c, poison);
      run_tail(exec, std::span(&poisoned.args, 1));
      for (int64_t i = 0; i < problem.groups * problem.each * problem.dim; ++i) {
        ASSERT_NEAR(clean.value[i], poisoned.value[i], 0x1p-6) << "element " << i;
      }
    }
  });
}

Settings means_settings(const char* rule, std::initializer_list<std::pair<const char*, const char*>> set) {
  Settings settings = method("scope-exact", {{"rule", rule}, {"density", "0.2"}, {"groups", "6"}, {"tail", "means"}});
  for (const auto& [key, value] : set) set_setting(settings, key, value);
  return settings;
}

// What the text of docs/reference/algorithm.md says of one head of a call, in float64, from its labels and masks alone.
void expect_head(const Inputs& in, const Plan& plan, const Result& result, const Extra& extra, int64_t b, int64_t h) {
  const int64_t words = mask_words(in.k_tokens), head = b * in.heads + h, dim = in.dim;
  const auto parts = static_cast<size_t>(plan.settings.tail_parts);
  const double scale = extra.scale > 0 ? static_cast<double>(extra.scale) : 1 / std::sqrt(static_cast<double>(dim));
  const uint32_t* keep = result.keep.data() + b * words;
  const auto row_of = [&](const std::vector<float>& x, int64_t tokens, int64_t t) {
    const float* row = x.data() + (head * tokens + t) * dim;
    return std::vector<double>(row, row + dim);
  };
  const auto dot = [&](const std::vector<double>& x, const std::vector<double>& y) {
    return scale * std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
  };
  std::vector<int64_t> keys;  // that take part
  for (int64_t j = 0; j < in.k_tokens; ++j) {
    if (extra.valid_key(in, b, j) && !mask_bit(keep, j)) keys.push_back(j);
  }
  const int64_t stride = plan.settings.tail_stride;
  const int64_t phase = (std::max<int64_t>(extra.place.layer, 0) + std::max<int64_t>(extra.place.step, 0)) % stride;
  for (int64_t group = 0; group < plan.groups; ++group) {
    const uint32_t* mask = result.mask.data() + (head * plan.selection_groups + group) * words;
    std::vector<int64_t> queries;
    std::vector<std::vector<double>> members;
    for (int64_t i = 0; i < in.q_tokens; ++i) {
      if (result.labels[static_cast<size_t>(head * in.q_tokens + i)] != group) continue;
      queries.push_back(i);
      members.push_back(row_of(in.q, in.q_tokens, i));
    }
    const Parts64 split(members, static_cast<int64_t>(parts), 2);
    std::vector<double> centre(static_cast<size_t>(dim));  // of the group
    for (const auto& member : members) {
      for (size_t c = 0; c < centre.size(); ++c) centre[c] += member[c] / static_cast<double>(members.size());
    }
    for (double& x : centre) x = reference::rounded(x, in.dtype);
    const auto mass_of = [&](int64_t j) { return std::exp(dot(centre, row_of(in.k, in.k_tokens, j))); };
    const auto n = std::ssize(keys),
               select_stride = n / plan.select_stride() < kFewestSampledKeys ? 1 : plan.select_stride();
    const double each =
        static_cast<double>(n) / static_cast<double>(n / select_stride);  // keys that a sampled one stands for
    double dropped = 0, all = 0;
    std::vector<double> sampled;
    for (int64_t i = 0; i < n / select_stride; ++i) {
      const int64_t j = keys[static_cast<size_t>(i * select_stride)];  // of layer 0 and step 0
      sampled.push_back(each * mass_of(j));
      all += sampled.back();
      if (select_stride == 1 && !mask_bit(mask, j)) dropped += sampled.back();
    }
    if (select_stride > 1) {  // rule fixed keeps the heaviest of the sample
      std::sort(sampled.begin(), sampled.end(), std::greater<>());
      for (auto i = ceil_share(plan.settings.density, std::ssize(sampled)); i < std::ssize(sampled); ++i) {
        dropped += sampled[static_cast<size_t>(i)];
      }
    }
    for (int64_t j = 0; j < in.k_tokens; ++j) {
      if (mask_bit(keep, j)) all += mass_of(j);
    }
    const double share = std::min(plan.settings.tail_weight * dropped / all, 1 - 0x1p-10);
    const auto sees = [&](int64_t j) { return mask_bit(mask, j) || mask_bit(keep, j); };
    std::vector<std::vector<double>> seen, means;  // of each query
    for (size_t i = 0; i < queries.size(); ++i) {
      seen.push_back(exact_row(in, b, h, queries[i], sees, scale));
      std::vector<double> centroid = split.centroids[static_cast<size_t>(split.part_of[i])];
      for (double& x : centroid) x = reference::rounded(x, in.dtype);
      double mass = 0;
      std::vector<double>& mean = means.emplace_back(static_cast<size_t>(dim));
      for (size_t j = 0; j < keys.size(); ++j) {
        if (mask_bit(mask, keys[j]) || static_cast<int64_t>(j) % stride != phase) continue;
        const double weight = std::exp(dot(centroid, row_of(in.k, in.k_tokens, keys[j])));
        const auto value = row_of(in.v, in.k_tokens, keys[j]);
        mass += weight;
        for (size_t c = 0; c < mean.size(); ++c) mean[c] += weight * value[c];
      }
      for (double& x : mean) x = mass > 0 ? x / mass : 0;
    }
    for (size_t i = 0; i < queries.size(); ++i) {
      const size_t first = i / 16 * 16, end = std::min(first + 16, queries.size());
      std::vector<double> out = seen[i];
      for (size_t c = 0; c < out.size(); ++c) {
        double bundle = 0;
        for (size_t other = first; other < end; ++other) bundle += seen[other][c] / static_cast<double>(end - first);
        out[c] = (1 - share) * seen[i][c] + share * (means[i][c] + plan.settings.tail_follow * (seen[i][c] - bundle));
      }
      ASSERT_NO_FATAL_FAILURE(expect_rows(in, result, b, h, queries[i], out));
      double kept = 0;
      for (int64_t j = 0; j < in.k_tokens; ++j) {
        if (sees(j)) kept += std::exp(dot(members[i], row_of(in.k, in.k_tokens, j)));
      }
      ASSERT_NEAR(result.lse[static_cast<size_t>(head * in.q_tokens + queries[i])], std::log(kept) - std::log1p(-share),
                  in.dtype == DType::f32 ? 1e-4 : 2e-2);
    }
  }
}

// Text and padding take part in neither parts nor means, and text queries have no tail.
TEST(TailMeans, CallsAreWhatTheyAreDefinedAs) {
  const Context context = tested_context();
  for (const char* parts : {"1", "3"}) {
    for (const char* stride : {"1", "3"}) {
      for (const int64_t step : {-1, 2}) {
        SCOPED_TRACE(fmt::format("{} parts, stride {}, step {}", parts, stride, step));
        Ragged ragged(32, 11);
        const Plan plan(context,
                        means_settings("fixed", {{"tail_parts", parts}, {"tail_stride", stride}, {"dense_steps", "0"}}),
                        ragged.shape());
        ragged.extra.place = {.layer = step < 0 ? -1 : 3, .step = step, .steps = step < 0 ? 0 : 9};
        const Result result = run(plan, ragged.in, ragged.extra);
        ASSERT_EQ(result.stats.reason, Reason::sparse);
        ASSERT_NO_FATAL_FAILURE(expect_invalid(ragged.in, result, ragged.extra));
        for (int64_t head = 0; head < 4; ++head) {
          ASSERT_NO_FATAL_FAILURE(expect_head(ragged.in, plan, result, ragged.extra, head / 2, head % 2));
          for (const int64_t i : {0, 77}) {
            const auto sees = [&](int64_t j) { return ragged.extra.valid_key(ragged.in, head / 2, j); };
            ASSERT_NO_FATAL_FAILURE(
                expect_rows(ragged.in, result, head / 2, head % 2, i, exact_row(ragged.in, head / 2, head % 2, i, sees)));
          }
        }
      }
    }
  }
}

// Text counts once beside the keys of a sample, each of which stands for several.
TEST(TailMeansOnCpu, SharesBesideTextBySampledKeys) {
  const Context context = tested_context();
  const Inputs in(1, 2, 90, 2300, 16, 21);
  Extra extra;
  extra.keep.resize(static_cast<size_t>(mask_words(in.k_tokens)));
  for (int64_t j = 2100; j < in.k_tokens; ++j) set_mask_bit(extra.keep.data(), j);
  for (const char* select_stride : {"1", "2"}) {
    SCOPED_TRACE(fmt::format("every {}", select_stride));
    const Plan plan(context, means_settings("fixed", {{"tail_parts", "2"}, {"select_stride", select_stride}}), in.shape());
    const Result result = run(plan, in, extra);
    for (int64_t h = 0; h < 2; ++h) ASSERT_NO_FATAL_FAILURE(expect_head(in, plan, result, extra, 0, h));
  }
}

// Presets bring select_stride, which means nothing to codes and to rules that keep whole ones.
TEST(TailMeans, CodesAndWholeCodesSeeEveryKey) {
  const Context context = tested_context();
  const Inputs in(1, 2, 200, 2100, 32, 22);
  for (const char* rule : {"online", "clusters"}) {
    SCOPED_TRACE(rule);
    const Settings sampled =
        method("scope-mean", {{"proxy", "codes"}, {"rule", rule}, {"partition", "even:1"}, {"groups", "9"}});
    if (!tested_has(sampled)) continue;
    Settings whole = sampled;
    ASSERT_EQ(sampled.select_stride, 2);
    whole.select_stride = 1;
    EXPECT_TRUE(same_bits(run(Plan(context, sampled, in.shape()), in), run(Plan(context, whole, in.shape()), in)));
  }
}

TEST(TailMeans, CallsInHalfPrecisionAndOnAnyScale) {
  const Context context = tested_context();
  for (const DType dtype : limits().dtypes) {
    SCOPED_TRACE(dtype_name(dtype));
    const Inputs in(1, 2, 300, 310, 64, 12, dtype);
    Extra extra;
    extra.scale = 0.07f;
    const Plan plan(context, means_settings("fixed", {{"tail_parts", "2"}, {"tail_stride", "4"}}), in.shape());
    const Result result = run(plan, in, extra);
    for (int64_t h = 0; h < 2; ++h) ASSERT_NO_FATAL_FAILURE(expect_head(in, plan, result, extra, 0, h));
  }
}

TEST(TailMeans, NothingDroppedOrNoWeightIsBitwiseWithoutTail) {
  const Context context = tested_context();
  const Inputs in(1, 2, 200, 210, 16, 6);
  const auto at = [&](std::initializer_list<std::pair<const char*, const char*>> set) {
    return run(Plan(context, means_settings("online", set), in.shape()), in);
  };
  EXPECT_TRUE(same_bits(at({{"rho", "1"}}), at({{"rho", "1"}, {"tail", "none"}})));
  EXPECT_TRUE(same_bits(at({{"tail_weight", "0"}}), at({{"tail", "none"}})));
  EXPECT_FALSE(same_bits(at({}), at({{"tail", "none"}})));
}

TEST(TailMeans, BitwiseOverThreadsAndRuns) {
  const Inputs in(2, 2, 500, 500, 32, 9);
  const Settings settings = means_settings("online", {{"target_density", "0.3"}});
  const Result first = run(Plan(tested_context(1), settings, in.shape()), in);
  for (const int threads : {1, 2, 3, 5}) {
    EXPECT_TRUE(same_bits(first, run(Plan(tested_context(threads), settings, in.shape()), in))) << threads;
  }
}

// Whatever a state holds: parts are found anew in each call.
TEST(TailMeans, WarmCallsSplitAnew) {
  const Context context = tested_context();
  const Inputs in(1, 2, 400, 400, 16, 10);
  const Plan plan(context, means_settings("fixed", {{"tail_parts", "4"}}), in.shape());
  OwnState own(plan);
  Extra extra;
  extra.state = &own.state;
  run(plan, in, extra);
  const Result result = run(plan, in, extra);
  EXPECT_TRUE(result.stats.warm);
  for (int64_t h = 0; h < 2; ++h) ASSERT_NO_FATAL_FAILURE(expect_head(in, plan, result, extra, 0, h)) << "head " << h;
}

TEST(TailMeans, EveryMethodTakesIt) {
  const Context context = tested_context();
  const Inputs in(1, 2, 260, 260, 64, 7);
  for (const Method& row : methods_table()) {
    SCOPED_TRACE(row.name);
    if (row.settings().dense) continue;
    Settings settings = method(row.name, {{"tail", "means"}});
    set_setting(settings, "target_density", "0.5");
    Shape shape = in.shape();
    shape.rope = {24, 20, 20};
    const Result result = run(Plan(context, settings, shape), in);
    for (const float x : result.out) ASSERT_TRUE(std::isfinite(x));
  }
}

}  // namespace
}  // namespace scope::test
