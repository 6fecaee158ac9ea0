# Installs the headers, the library, the CMake package and the pkg-config file; all relocatable.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/hybridopt)
install(FILES
  ${PROJECT_SOURCE_DIR}/include/offload.h ${PROJECT_SOURCE_DIR}/include/offload_simple.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS hybridopt EXPORT hybridopt-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT hybridopt-targets NAMESPACE hybridopt:: DESTINATION ${package_dir})

write_basic_package_version_file(${PROJECT_BINARY_DIR}/hybridopt-config-version.cmake
  COMPATIBILITY SameMajorVersion)
install(FILES
  ${PROJECT_SOURCE_DIR}/cmake/hybridopt-config.cmake
  ${PROJECT_BINARY_DIR}/hybridopt-config-version.cmake
  DESTINATION ${package_dir})

# pkg-config finds the prefix from where its file lies.
set(pkgconfig_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH pkgconfig_to_prefix
  ${CMAKE_INSTALL_PREFIX}/${pkgconfig_dir} ${CMAKE_INSTALL_PREFIX})
configure_file(${PROJECT_SOURCE_DIR}/cmake/hybridopt.pc.in ${PROJECT_BINARY_DIR}/hybridopt.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/hybridopt.pc DESTINATION ${pkgconfig_dir})
