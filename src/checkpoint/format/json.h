// A strict reader of JSON that hands out one value after the other, in the order of the text. It
// knows what must come next, so that nothing is built up that was not asked for: memory is bounded
// by what the caller keeps. And the few functions that write JSON.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "base/function_ref.h"

namespace hybridopt::checkpoint {

// After the first thing that is not as asked for, error() tells it with its place, and everything
// else returns zeros and empty strings at once; loops end.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  struct Field {
    const char* key;
    FunctionRef<void()> read;
  };
  // An object with exactly these keys, each once, in any order.
  void Object(std::span<const Field> fields);
  void Object(std::initializer_list<Field> fields) {
    Object(std::span<const Field>(fields.begin(), fields.size()));
  }
  // An object with any keys; telling doubled ones is left to the caller.
  void Members(FunctionRef<void(std::string key)> member);
  void Array(FunctionRef<void()> element);

  std::string String();
  // Digits only: no sign, no fraction, no exponent, no leading zero.
  uint64_t Unsigned(uint64_t most = UINT64_MAX);
  // Any finite number.
  double Number();
  bool Bool();
  // Nothing but white space may follow.
  void End();

  // Says what is wrong with the value that was read last.
  [[gnu::format(printf, 2, 3)]] void Fail(const char* format, ...);
  bool ok() const { return error_.empty(); }
  const std::string& error() const { return error_; }

 private:
  void SkipSpace();
  bool Take(char expected);
  bool Consume(char expected);
  std::string_view NumberText();
  void Escape(std::string* text);
  uint32_t HexDigits();

  const std::string_view text_;
  size_t at_ = 0;
  std::string error_;
};

// Appends a string in quotes, with what must be escaped.
void AppendJsonString(std::string* json, std::string_view text);
// Appends the shortest digits that read back as the same finite number.
void AppendJsonNumber(std::string* json, double number);

// Whether a text is UTF-8 as Unicode defines it: shortest forms, no surrogates.
bool IsUtf8(std::string_view text);

}  // namespace hybridopt::checkpoint
