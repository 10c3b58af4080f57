// The assertion of the C++ tests: says which law broke, with both values, and ends the test; knows
// nothing of what is tested.
#pragma once

#include <cstdlib>
#include <iostream>

namespace check {

[[noreturn]] inline void fail(const char* file, int line, const char* law) {
  std::cerr << file << ":" << line << ": does not hold: " << law << std::endl;
  std::_Exit(1);  // other threads of the test may be in the middle of anything
}

template <class A, class B>
void equal(const A& a, const B& b, const char* file, int line, const char* law) {
  if (a == b) return;
  std::cerr << file << ":" << line << ": left is " << a << ", right is " << b << std::endl;
  fail(file, line, law);
}

}  // namespace check

// Macros, because a failure must name the place and the text of the law. Not disabled by NDEBUG.
#define CHECK(law) ((law) ? void() : ::check::fail(__FILE__, __LINE__, #law))
#define CHECK_EQ(a, b) ::check::equal((a), (b), __FILE__, __LINE__, #a " == " #b)
