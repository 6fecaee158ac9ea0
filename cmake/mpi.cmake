# The comm table over MPI. A library of its own, so that libhybridopt.so never needs an MPI.
set(HYBRIDOPT_MPI OFF CACHE STRING "Build the MPI adaptor: AUTO (where there is an MPI), ON, OFF")
set_property(CACHE HYBRIDOPT_MPI PROPERTY STRINGS AUTO ON OFF)

if(HYBRIDOPT_MPI STREQUAL "AUTO")
  find_package(MPI QUIET COMPONENTS C)
elseif(HYBRIDOPT_MPI)
  find_package(MPI REQUIRED COMPONENTS C)
endif()
if(NOT HYBRIDOPT_MPI OR NOT MPI_C_FOUND)
  return()
endif()

set(mpi_map ${PROJECT_SOURCE_DIR}/src/comm/adaptors/mpi.map)
add_library(hybridopt_mpi SHARED src/comm/adaptors/mpi.cpp src/comm/adaptors/ranks.cpp)
set_target_properties(hybridopt_mpi PROPERTIES
  VERSION ${PROJECT_VERSION} SOVERSION ${HYBRIDOPT_ABI} LINK_DEPENDS ${mpi_map})
target_include_directories(hybridopt_mpi PUBLIC include PRIVATE src)
# Only MPI's C interface is used.
target_compile_definitions(hybridopt_mpi PUBLIC OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
target_link_libraries(hybridopt_mpi PUBLIC MPI::MPI_C PRIVATE hybridopt_flags)
target_link_options(hybridopt_mpi PRIVATE -Wl,--version-script=${mpi_map} -Wl,--as-needed)

install(TARGETS hybridopt_mpi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES ${PROJECT_SOURCE_DIR}/include/offload_mpi.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
