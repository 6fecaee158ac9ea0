// A strict reader of JSON that returns one value after the other, in the order of the text, and
// functions that write JSON. The caller of the reader says what must come next. The reader builds
// no tree, so memory is bounded by what the caller keeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "base/function_ref.h"

namespace hybridopt::checkpoint {

// After the first value that is not as requested, error() describes it with its position in the
// text. From then on all functions return zeros and empty strings at once, and loops end.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  struct Field {
    const char* key;
    FunctionRef<void()> read;
    bool is_optional = false;
  };
  // An object with exactly these keys, each once, in any order. Optional ones may be missing.
  void Object(std::span<const Field> fields);
  void Object(std::initializer_list<Field> fields) {
    Object(std::span<const Field>(fields.begin(), fields.size()));
  }
  // An object with any keys; the caller must check for keys that occur twice.
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

  // Sets the error for the value that was read last.
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

// Appends a string in quotes and escapes its characters where needed.
void AppendJsonString(std::string* json, std::string_view text);
// Appends the shortest digits that read back as the same finite number.
void AppendJsonNumber(std::string* json, double number);

}  // namespace hybridopt::checkpoint
