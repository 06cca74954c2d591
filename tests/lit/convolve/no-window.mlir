// RUN: not gossamer-opt %s -p 'convolve' 2>&1 | filecheck %s

// CHECK: @region has no kernel.window
func.func @region(%x: tensor<?x54xf32>) -> tensor<?x54xf32> {
  return %x : tensor<?x54xf32>
}
