// What the recorder has written down.
#pragma once

#include <string>
#include <thread>
#include <vector>

struct RecordedEvent {
  std::thread::id thread;
  std::string name;  // "" ends the thread's latest range
};

using TakeRecordedFunction = void(std::vector<RecordedEvent>* taken);
