from fxamp.counting.table import main

main()
