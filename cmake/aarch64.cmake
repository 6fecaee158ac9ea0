# Toolchain file: builds for 64-bit Arm with Debian's cross compiler (g++-aarch64-linux-gnu) and runs
# the tests in an emulator (qemu-user). QEMU_CPU in the environment names the CPU of the emulator.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

# The libraries that are headers only, taken from the build machine's own packages, and nothing else
# of its /usr/include, which is for another CPU.
set(headers ${CMAKE_BINARY_DIR}/headers)
file(MAKE_DIRECTORY ${headers}/include)
foreach(header hwy xxhash.h xxh3.h nlohmann)
  if(EXISTS /usr/include/${header})
    file(CREATE_LINK /usr/include/${header} ${headers}/include/${header} SYMBOLIC)
  endif()
endforeach()
set(CMAKE_FIND_ROOT_PATH ${headers} /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64;-L;/usr/aarch64-linux-gnu)
