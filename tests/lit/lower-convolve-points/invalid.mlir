// RUN: not gossamer-opt %s -p 'expose-storage' 2>&1 | filecheck %s

// CHECK: has positions tensor<?xi32>, must be integers [offsets, tiles+1]
func.func @region(%x: tensor<?x?xf32>, %w: tensor<?x?x?xf32>, %b: tensor<?xf32>, %i: tensor<?xi32>, %o: tensor<?xi32>, %r: tensor<?xi32>, %p: tensor<?xi32>) -> tensor<?x?xf32> {
  %y = "kernel.convolve_points"(%x, %w, %b, %i, %o, %r, %p) : (tensor<?x?xf32>, tensor<?x?x?xf32>, tensor<?xf32>, tensor<?xi32>, tensor<?xi32>, tensor<?xi32>, tensor<?xi32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}
