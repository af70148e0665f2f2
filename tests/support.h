// What every test program has: the repository's folder, and numbers that no locale changes.
#pragma once

#include <string>

namespace scope::test {

// A function in main.cpp, so that the other files compile to the same objects in every clone.
std::string repository();

// A decimal point is a point here, also where the locale has a comma.
double number(const std::string& text);

}  // namespace scope::test
