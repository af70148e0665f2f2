// main of every test program. It takes the environment's locale, as many hosts do: our numbers must not follow it.
#include <gtest/gtest.h>

#include <charconv>
#include <clocale>
#include <locale>
#include <stdexcept>

#include "support.h"

namespace scope::test {

std::string repository() { return SCOPE_REPOSITORY; }

double number(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) throw std::invalid_argument("not a number: " + text);
  return value;
}

}  // namespace scope::test

int main(int argc, char** argv) {
  // A locale that was never generated is C, as for any program.
  if (std::setlocale(LC_ALL, "") != nullptr) std::locale::global(std::locale(""));
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
