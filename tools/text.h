// Output for people: tables with aligned columns, words in quotes, a progress bar.
#pragma once

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "memory/size_text.h"

namespace tool {

using hybridopt::SizeText;

// Changes only ASCII letters.
std::string LowerCase(std::string text);

// "6 x 5"
std::string ShapeText(const std::vector<int64_t>& shape);

class Table {
 public:
  enum class Align { kLeft, kRight };
  struct Column {
    const char* title;
    Align align;
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  void Add(std::vector<std::string> cells);  // escapes what is not printable (base/utf8.h)
  void Print(std::ostream& out) const;

 private:
  const std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// The one of `words` that is most similar to `word`, or that has it as a part; empty if none is.
std::string NearestWord(const std::string& word, const std::vector<std::string>& words);

// "0.62": at most three significant digits.
std::string NumberText(double number);

// A word of the command line in an error: "'plam'". What is printable of a long one is cut:
// "'plammmm'... (3000 bytes)".
std::string Quoted(const std::string& word);

// "1 rank", "2 ranks".
std::string Counted(uint64_t count, const char* noun);

// The text in green or yellow, if standard output is a terminal and NO_COLOR is not set.
std::string Green(const std::string& text);
std::string Yellow(const std::string& text);

// A line on standard error that says what is being done, if standard error is a terminal. The next
// StageLine replaces it.
class StageLine {
 public:
  StageLine();
  ~StageLine();  // wipes the line
  void Show(const char* text);

 private:
  const bool terminal_;
};

// A progress bar with rate and remaining time on standard error; nothing is shown if standard error
// is not a terminal.
class ProgressBar {
 public:
  explicit ProgressBar(const char* what);
  ~ProgressBar();  // wipes the bar
  void Show(uint64_t done, uint64_t total);

 private:
  const char* const what_;
  const bool terminal_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  int percent_ = -1;  // as shown
};

}  // namespace tool
