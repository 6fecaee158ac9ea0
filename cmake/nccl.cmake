# The comm table over NCCL. A library of its own, which finds NCCL when it runs.
option(HYBRIDOPT_NCCL "Build the NCCL adaptor where CUDA is" OFF)
if(NOT HYBRIDOPT_NCCL OR NOT HYBRIDOPT_HAS_CUDA)
  return()
endif()

set(nccl_map ${PROJECT_SOURCE_DIR}/src/comm/adaptors/nccl.map)
add_library(hybridopt_nccl SHARED
  src/comm/adaptors/nccl.cpp src/comm/adaptors/nccl_functions.cpp src/comm/adaptors/ranks.cpp)
set_target_properties(hybridopt_nccl PROPERTIES
  VERSION ${PROJECT_VERSION} SOVERSION ${HYBRIDOPT_ABI} LINK_DEPENDS ${nccl_map})
target_include_directories(hybridopt_nccl PUBLIC include PRIVATE src)
target_include_directories(hybridopt_nccl SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(hybridopt_nccl PRIVATE hybridopt_flags CUDA::cudart_static ${CMAKE_DL_LIBS})
target_link_options(hybridopt_nccl PRIVATE -Wl,--version-script=${nccl_map} -Wl,--as-needed)

install(TARGETS hybridopt_nccl LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES ${PROJECT_SOURCE_DIR}/include/offload_nccl.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
