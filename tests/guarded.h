// Memory between canaries, for everything that a test lends: the one guard that all tests share.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "stages/backend.h"

namespace scope::test {

// Bytes on either side of a buffer: more than one vector store, or a row of padding, past the end.
inline constexpr int64_t kGuard = 192;
// What they hold at an even address: NaN in every float type, and no label.
inline constexpr std::array<uint8_t, kGuard> kCanary = [] {
  std::array<uint8_t, kGuard> bytes{};
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = i % 2 == 0 ? 0xfe : 0x7f;
  return bytes;
}();

// `count` elements between canaries, poisoned: a stage must write all that it promises, read none of it first, and
// touch nothing around it. Checked on destruction.
template <class T>
class Guarded {
 public:
  explicit Guarded(int64_t count, uint8_t poison = 0xff, int64_t misalign = 0)
      : bytes_(count * static_cast<int64_t>(sizeof(T))), memory_(static_cast<size_t>(bytes_ + 2 * kGuard + 64)) {
    const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory_.data()) % 64);
    front_ = (64 - past) % 64 + kGuard + misalign * static_cast<int64_t>(sizeof(T));
    each_guard([&](size_t i) { memory_[i] = kCanary[i % 2]; });
    std::memset(memory_.data() + front_, poison, static_cast<size_t>(bytes_));
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { EXPECT_TRUE(intact()) << "bytes around a buffer were written"; }

  bool intact() const {
    bool same = true;
    each_guard([&](size_t i) { same = same && memory_[i] == kCanary[i % 2]; });
    return same;
  }
  T* data() { return reinterpret_cast<T*>(memory_.data() + front_); }
  const T* data() const { return reinterpret_cast<const T*>(memory_.data() + front_); }
  T& operator[](int64_t i) { return data()[i]; }
  const T& operator[](int64_t i) const { return data()[i]; }
  int64_t size() const { return bytes_ / static_cast<int64_t>(sizeof(T)); }
  std::vector<T> values() const { return {data(), data() + size()}; }
  std::vector<uint8_t> bytes() const { return {memory_.begin() + front_, memory_.begin() + front_ + bytes_}; }

 private:
  template <class Body>
  void each_guard(const Body& body) const {
    for (size_t i = 0; i < static_cast<size_t>(front_); ++i) body(i);
    for (size_t i = static_cast<size_t>(front_ + bytes_); i < memory_.size(); ++i) body(i);
  }
  int64_t bytes_, front_ = 0;
  std::vector<uint8_t> memory_;
};

template <class... T>
std::vector<uint8_t> joined_bytes(const Guarded<T>&... buffers) {
  std::vector<uint8_t> all;
  const auto append = [&](const std::vector<uint8_t>& part) { all.insert(all.end(), part.begin(), part.end()); };
  (append(buffers.bytes()), ...);
  return all;
}

// The same in a backend's memory, which the host reaches through read and write alone.
template <class T>
class Lent {
 public:
  Lent(const Backend& backend, const Exec& exec, int64_t count)
      : backend_(backend),
        exec_(exec),
        bytes_(count * static_cast<int64_t>(sizeof(T))),
        memory_(static_cast<std::byte*>(backend.allocate(exec, bytes_ + 2 * kGuard)), backend.release) {
    std::vector<uint8_t> image(static_cast<size_t>(bytes_ + 2 * kGuard), 0xff);
    std::copy(kCanary.begin(), kCanary.end(), image.begin());
    std::copy(kCanary.begin(), kCanary.end(), image.end() - kGuard);
    backend_.write(exec_, image.data(), memory_.get(), std::ssize(image));
  }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;
  ~Lent() {
    try {
      EXPECT_TRUE(intact()) << "bytes around a buffer were written";
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }

  bool intact() const {
    std::array<uint8_t, kGuard> found;
    for (const int64_t at : {int64_t{0}, kGuard + bytes_}) {
      backend_.read(exec_, memory_.get() + at, found.data(), kGuard);
      if (found != kCanary) return false;
    }
    return true;
  }
  T* data() const { return reinterpret_cast<T*>(memory_.get() + kGuard); }
  int64_t size() const { return bytes_ / static_cast<int64_t>(sizeof(T)); }
  void write(const std::vector<T>& from) {
    ASSERT_EQ(std::ssize(from), size());
    backend_.write(exec_, from.data(), data(), bytes_);
  }
  std::vector<T> values() const {
    std::vector<T> out(static_cast<size_t>(size()));
    backend_.read(exec_, data(), out.data(), bytes_);
    return out;
  }

 private:
  const Backend& backend_;
  Exec exec_;
  int64_t bytes_;
  std::unique_ptr<std::byte, void (*)(void*)> memory_;
};

using GuardedScratch = Guarded<std::byte>;
inline Scratch scratch_of(GuardedScratch& memory) { return {memory.data(), memory.size()}; }

}  // namespace scope::test
